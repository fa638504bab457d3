// Types shared by the implementations of paged attention (attention_rows.h, attention_token.h, attention_tiles.h,
// attention_decode.h): the description of a step, tasks and partial results.
#pragma once

#include <algorithm>
#include <climits>
#include <vector>

#include "eight_bits.h"

namespace {

constexpr float kLog2e = 1.44269504f;

struct Layer {  // constant across steps; strides in elements
  const void* k_cache;
  const void* v_cache;
  long k_block, k_slot, k_head, v_block, v_slot, v_head;
  long num_heads, num_kv_heads, head_dim, v_dim, block_size, dtype, window;
  float scale, soft_cap;
  long cache;  // a CacheType
  Scales k_scales, v_scales;
  const float* sinks;  // [num_heads]: scores of one more key per head, whose value is zero; null: none
  Scales rope_scales;  // of latents, for the entries of a key after those that are its value; otherwise without a base

  // Returns the sum of a row's softmax, relative to its maximum m (of scores times log2 e), with the head's sink.
  float with_sink(long head, float m, float sum) const {
    return sinks ? sum + std::exp2(sinks[head] * kLog2e - m) : sum;
  }
  bool two_scales() const { return rope_scales.base; }

  // Offset in each cache, in elements, of the token at position `at` of a sequence.
  long k_place(const int* table, long at) const { return table[at / block_size] * k_block + at % block_size * k_slot; }
  long v_place(const int* table, long at) const { return table[at / block_size] * v_block + at % block_size * v_slot; }
};

struct Step {  // i: index of a request; token: row of q and out
  const Layer& layer;
  const void* q;
  void* out;
  long ldq, ldo;
  const int* block_table;
  long ld_table;
  const int* seq_lens;
  const int* query_start_loc;
  long num_requests;
  const long* wanted;  // ascending: the tokens whose results are read; null: all
  long num_wanted;
  std::vector<long> position = {};  // each token's position in its request

  int group() const { return int(layer.num_heads / layer.num_kv_heads); }
  int query_len(long i) const { return query_start_loc[i + 1] - query_start_loc[i]; }
  long context_len(long i) const { return seq_lens[i] - query_len(i); }
  long first_key(long position) const { return layer.window > 0 ? std::max(0L, position - layer.window + 1) : 0; }
  // Returns the first wanted token of request i, or the token after its last if none is wanted.
  int first_wanted(long i) const {
    if (!wanted) return query_start_loc[i];
    const long* at = std::lower_bound(wanted, wanted + num_wanted, long(query_start_loc[i]));
    return int(std::min(at < wanted + num_wanted ? *at : LONG_MAX, long(query_start_loc[i + 1])));
  }
  const int* table(long i) const { return block_table + i * ld_table; }
};

// Key ranges are cut at multiples of kSplit from a sequence's start, independent of the batch: decode tasks and shared
// prefixes end there.
constexpr long kSplit = 128;

// A token's partial result for one query head: the softmax over some of the keys. The plan assigns the slots.
struct Partial {
  float *acc, *l, *m;  // weighted values [v_dim], sum as 16 terms, maximum (of scores times log2 e)
};

struct Partials {
  float* base;
  long num_heads, v_dim;
  size_t floats() const { return num_heads * (v_dim + 32); }  // per slot
  Partial at(long slot, long head) const {
    float* p = base + slot * floats() + head * (v_dim + 32);
    return {p, p + v_dim, p + v_dim + 16};
  }
};

// Attention of some tokens over the keys [begin, end). The tokens belong to one request, or to several requests that
// share these keys.
struct Task {
  const int* tokens;
  int count;
  const int* table;  // block table of the keys
  long h0, h1;       // KV heads
  long begin, end;
  bool resume;     // start from the tokens' partial results
  bool keep;       // write partial results; false: write the output
  long slot = -1;  // slot of the single token's partial result; -1: use the plan's slots
};

template <typename T>
void write_row(T* out, const float* acc, float l, long d) {
  const vf inverse = set1(l > 0 ? 1.f / l : 0.f);
  for (long i = 0; i < d; i += 16) store(out + i, load(acc + i) * inverse);
}

}  // namespace
