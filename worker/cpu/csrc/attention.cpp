// Attention over caches of the type of the queries; those in 8 bits are compiled on their own (attention_int8.cpp,
// attention_e4m3.cpp).
#include "attention_step.h"
#include "kernels.h"

extern "C" {

// Computes the attention of a step.
// q: [tokens, num_heads, head_dim], out: [tokens, num_heads, v_dim], the last two dimensions contiguous. Both sizes are
// multiples of 16 (32 for AMX); head_dim is at most 576, v_dim 512. Values may be the first columns of the keys.
// path: bit flags; 1: no AMX, 2: one order of summation.
// layer: a Layer (attention.h).
// wanted: ascending tokens whose results are read; the results of other tokens may be left unwritten. Null: all.
void quire_paged_attention(const void* layer, const void* q, long ldq, void* out, long ldo, const int* block_table,
                           long ld_table, const int* seq_lens, const int* query_start_loc, long num_requests, int path,
                           const long* wanted, long num_wanted) {
  const long cache = ((const Layer*)layer)->cache;
  const auto attend = cache == kInt8 ? quire_attend_int8 : cache == kE4m3 ? quire_attend_e4m3 : quire_attend_own;
  attend(layer, q, ldq, out, ldo, block_table, ld_table, seq_lens, query_start_loc, num_requests, path, wanted,
         num_wanted);
}

void quire_attend_own(const void* layer, const void* q, long ldq, void* out, long ldo, const int* block_table,
                      long ld_table, const int* seq_lens, const int* query_start_loc, long num_requests, int path,
                      const long* wanted, long num_wanted) {
  attend_step<void>((const Layer*)layer, q, ldq, out, ldo, block_table, ld_table, seq_lens, query_start_loc,
                    num_requests, path, wanted, num_wanted);
}
}
