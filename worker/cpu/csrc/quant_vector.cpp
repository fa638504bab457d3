// The products of quantized weights with a table of scales (quant_vector.h).
#include "quant_vector.h"

QuantBlock table_block(int kind) { return quant_block_of_kind<false, false>(kind); }
