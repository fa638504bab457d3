// The products of each kind of quantized weights (quant_vector.h).
#include "gemm_vector.h"
#include "quant_vector.h"

QuantBlock quant_block_of(const Quant& q) {
  QuantBlock block = nullptr;
  of_kind(q.kind, [&](auto kind) { if constexpr (kind != kFloats8) block = quant_block<kind>; });
  return block;
}
