// The products of quantized weights with SuperScales (quant_vector.h).
#include "quant_vector.h"

QuantBlock super_block(int kind) { return quant_block_of_kind<true, false>(kind); }
