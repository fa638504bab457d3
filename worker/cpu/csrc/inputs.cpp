// Between the tables of the requests and a step: its tensors from them, and what it sampled into them. See worker/batch/input_batch.py, whose `_fill` is the twin of the
// first, and worker/batch/request_table.py.
#include <cstring>

extern "C" {

// step: rows, computed, scheduled [num_requests each], starts [num_requests + 1] and samples [num_samples], one after another. tokens [.., max_model_len] and blocks
// [.., max_blocks] are the tables. Fills input_ids, positions and slots of all tokens, query_start_loc [num_requests + 1], lengths and block_table [num_requests, width],
// rows ld_table apart; and for each request of `samples`, in `sampling` [3, num_samples], its row, its length and its last token.
void quire_fill_inputs(const long* step, long num_requests, long num_samples, const int* tokens, long max_model_len, const int* blocks, long max_blocks, long block_size,
                       int* input_ids, long* positions, long* slots, int* query_start_loc, int* lengths, int* block_table, long ld_table, long width, long* sampling) {
  const long *rows = step, *computed = rows + num_requests, *scheduled = computed + num_requests, *starts = scheduled + num_requests, *samples = starts + num_requests + 1;
  long at = 0;
  for (long i = 0; i < num_requests; i++) {
    const int *row_tokens = tokens + rows[i] * max_model_len, *row_blocks = blocks + rows[i] * max_blocks;
    const long end = computed[i] + scheduled[i];
    query_start_loc[i] = int(at);
    lengths[i] = int(end);
    for (long position = computed[i]; position < end; position++, at++) {
      input_ids[at] = row_tokens[position];
      positions[at] = position;
      slots[at] = row_blocks[position / block_size] * block_size + position % block_size;
    }
    memcpy(block_table + i * ld_table, row_blocks, width * sizeof(int));
  }
  query_start_loc[num_requests] = int(at);
  for (long s = 0; s < num_samples; s++) {
    const long i = samples[s];
    sampling[s] = rows[i];
    sampling[num_samples + s] = lengths[i];
    sampling[2 * num_samples + s] = starts[i + 1] - 1;
  }
}

// tokens[rows[i], positions[i]] = token_ids[i], or 0 where that is negative; a position of max_model_len has no place.
void quire_append_tokens(int* tokens, long max_model_len, const long* rows, const long* positions, const long* token_ids, long num_tokens) {
  for (long i = 0; i < num_tokens; i++)
    if (positions[i] < max_model_len) tokens[rows[i] * max_model_len + positions[i]] = token_ids[i] < 0 ? 0 : int(token_ids[i]);
}
}
