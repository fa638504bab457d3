// The products of quantized weights with a table of scales by activations of 8 bits (quant_vector.h).
#include "quant_vector.h"

QuantBlock narrow_table_block(int kind) { return quant_block_of_kind<false, true>(kind); }
