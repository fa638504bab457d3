// The products of quantized weights with SuperScales by activations of 8 bits (quant_vector.h).
#include "quant_vector.h"

QuantBlock narrow_super_block(int kind) { return quant_block_of_kind<true, true>(kind); }
