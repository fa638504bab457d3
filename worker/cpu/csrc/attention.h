// What the ways through paged attention (attention_rows.h, attention_tiles.h) have in common: the description of a step, and partial results.
#pragma once

#include <algorithm>
#include <climits>
#include <vector>

#include "simd.h"

namespace {

struct Layer {  // what stays the same from step to step; strides in elements
  const void* k_cache;
  const void* v_cache;
  long k_block, k_slot, k_head, v_block, v_slot, v_head;
  long num_heads, num_kv_heads, head_dim, block_size, dtype, window;
  float scale, soft_cap;

  // Where the token at position `at` of a sequence lies in each cache, in elements from its start.
  long k_place(const int* table, long at) const { return table[at / block_size] * k_block + at % block_size * k_slot; }
  long v_place(const int* table, long at) const { return table[at / block_size] * v_block + at % block_size * v_slot; }
};

struct Step {  // i is a request, token a row of q and out
  const Layer& layer;
  const void* q;
  void* out;
  long ldq, ldo;
  const int* block_table;
  long ld_table;
  const int* seq_lens;
  const int* query_start_loc;
  long num_requests;
  const long* wanted;  // ascending: the tokens whose results are read, or null for all
  long num_wanted;
  std::vector<long> position = {};  // of each token in its request

  int group() const { return int(layer.num_heads / layer.num_kv_heads); }
  int query_len(long i) const { return query_start_loc[i + 1] - query_start_loc[i]; }
  long context_len(long i) const { return seq_lens[i] - query_len(i); }
  long first_key(long position) const { return layer.window > 0 ? std::max(0L, position - layer.window + 1) : 0; }
  // The first of request i's tokens that is wanted; the one behind its last if none is.
  int first_wanted(long i) const {
    if (!wanted) return query_start_loc[i];
    const long* at = std::lower_bound(wanted, wanted + num_wanted, long(query_start_loc[i]));
    return int(std::min(at < wanted + num_wanted ? *at : LONG_MAX, long(query_start_loc[i + 1])));
  }
  const int* table(long i) const { return block_table + i * ld_table; }
};

constexpr float kLog2e = 1.44269504f;

// Key ranges are cut at multiples of this, counted from a sequence's start, whatever the batch: a task of decode ends there, and a shared prefix.
constexpr long kSplit = 128;

// Partial results of tokens: the softmax over some of the keys, for each query head. Slots are handed out by the plan.
struct Partial {
  float *acc, *l, *m;  // weighted values [head_dim], sum as 16 terms, maximum (of scores times log2 e)
};

struct Partials {
  float* base;
  long num_heads, head_dim;
  size_t floats() const { return num_heads * (head_dim + 32); }  // of a slot
  Partial at(long slot, long head) const {
    float* p = base + slot * floats() + head * (head_dim + 32);
    return {p, p + head_dim, p + head_dim + 16};
  }
};

// Some tokens of a request, or of several whose block tables begin alike, against keys that all of them have.
struct Task {
  const int* tokens;
  int count;
  const int* table;  // where the keys [begin, end) lie
  long h0, h1;       // KV heads
  long begin, end;
  bool resume;     // from the tokens' partial results
  bool keep;       // as partial results; else this is the end
  long slot = -1;  // of the one token's partial result; else the plan knows them
};

template <typename T>
void write_row(T* out, const float* acc, float l, long d) {
  const vf inverse = set1(l > 0 ? 1.f / l : 0.f);
  for (long i = 0; i < d; i += 16) store(out + i, load(acc + i) * inverse);
}

}  // namespace
