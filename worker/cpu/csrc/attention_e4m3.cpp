// Attention over keys and values stored as e4m3.
#include "attention_step.h"
#include "kernels.h"

extern "C" void quire_attend_e4m3(const void* layer, const void* q, long ldq, void* out, long ldo,
                                  const int* block_table, long ld_table, const int* seq_lens,
                                  const int* query_start_loc, long num_requests, int path, const long* wanted,
                                  long num_wanted) {
  attend_step<e4m3>((const Layer*)layer, q, ldq, out, ldo, block_table, ld_table, seq_lens, query_start_loc,
                    num_requests, path, wanted, num_wanted);
}
