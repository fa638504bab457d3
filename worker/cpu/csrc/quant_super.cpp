// The products of each kind of quantized weights with SuperScales (quant_vector.h); a file of its own, to be compiled
// at the same time as the others.
#include "gemm_vector.h"
#include "quant_vector.h"

QuantBlock super_block_of(const Quant& q) {
  QuantBlock block = nullptr;
  of_kind(q.kind, [&](auto kind) { if constexpr (is_super_kind(kind)) block = quant_block<kind>; });
  return block;
}
