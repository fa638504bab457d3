// The products of each kind of quantized weights with a table of scales (quant_vector.h).
#include "gemm_vector.h"
#include "quant_vector.h"

QuantBlock quant_block_of(const Quant& q) {
  if (is_super_kind(q.kind)) return super_block_of(q);
  QuantBlock block = nullptr;
  of_kind(q.kind, [&](auto kind) { if constexpr (kind != kFloats8 && !is_super_kind(kind)) block = quant_block<kind>; });
  return block;
}
