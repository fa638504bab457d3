// Copies between the request tables (worker/batch/request_table.py) and a step: fills the step's tensors from the
// tables and appends the sampled tokens to them. `Ops.fill_inputs` in worker/platforms/ops.py is the twin of
// quire_fill_inputs.
#include <cstring>

extern "C" {

// Fills input_ids, positions and slots of all tokens, query_start_loc [num_requests + 1], lengths [num_requests]
// and block_table [num_requests, width] with row stride ld_table. Writes the row, the length and the index of the last
// token of each request in `samples` to `sampling` [3, num_samples].
// step: rows, computed, scheduled [num_requests each], starts [num_requests + 1], samples [num_samples]; concatenated.
// tokens [.., max_model_len] and blocks [.., max_blocks] are the tables.
void quire_fill_inputs(const long* step, long num_requests, long num_samples, const int* tokens, long max_model_len,
                       const int* blocks, long max_blocks, long block_size, int* input_ids, long* positions,
                       long* slots, int* query_start_loc, int* lengths, int* block_table, long ld_table, long width,
                       long* sampling) {
  const long *rows = step, *computed = rows + num_requests, *scheduled = computed + num_requests,
             *starts = scheduled + num_requests, *samples = starts + num_requests + 1;
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

// Sets tokens[rows[i], positions[i]] to token_ids[i], or to 0 if that is negative. Skips positions >= max_model_len.
void quire_append_tokens(int* tokens, long max_model_len, const long* rows, const long* positions,
                         const long* token_ids, long num_tokens) {
  for (long i = 0; i < num_tokens; i++)
    if (positions[i] < max_model_len)
      tokens[rows[i] * max_model_len + positions[i]] = token_ids[i] < 0 ? 0 : int(token_ids[i]);
}
}
