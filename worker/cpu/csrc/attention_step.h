// Causal attention over a paged KV cache, for decode, prefill, chunked prefill, and any mixture in one call. Reads keys
// and values directly from the cache.
//
// bf16 uses AMX tiles for prefill (attention_tiles.h) and for decode with up to 16 query heads per KV head
// (attention_decode.h). Everything else uses vectors (attention_rows.h, for one token attention_token.h). Keys that
// several requests share are read once for all of them (attention_share.h).
//
// Key ranges start at absolute multiples of kSplit and partial results merge in order, so neither the batch nor the
// number of threads changes a token's result as long as the token takes the same path. kOneOrder guarantees that path:
// all keys of a token are summed in one order, for any batch and any chunking of the prompt, and sharing keys changes
// no bit. Without kOneOrder, shared keys and requests with several tokens take the prefill path, the keys of a single
// token are split across threads, and many rows may use fixed-point numbers, whose values share a scale with those of
// the other keys of a task.
#pragma once

#include <numeric>

#include "attention.h"
#include "attention_decode.h"
#include "attention_rows.h"
#include "attention_share.h"
#include "attention_tiles.h"
#include "attention_token.h"
#include "parallel.h"

namespace {

constexpr int kNoTiles = 1, kOneOrder = 2;  // flags of `path`

struct Merge {  // a token's partial results, in consecutive slots
  int token;
  long first, count;
};

struct Plan {
  std::vector<int> tokens;  // all tokens of the step in order, then the tokens of each shared prefix
  std::vector<long> slots;  // each token's slot for shared keys; the slots for splits of its own keys follow it
  long num_slots = 0;
  std::vector<std::vector<Task>> shared;    // by level; each level resumes from the results of the previous ones
  std::vector<Task> tiles, decode, vector;  // each request's own keys: with AMX (tiles, decode) or vectors
  int rows = 0;                             // of the largest task
  std::vector<Merge> merges;
};

class Planner {
 public:
  Planner(const Step& s, int threads, int path)
      : s_(s),
        l_(s.layer),
        threads_(threads),
        one_order_(path & kOneOrder),
        num_tokens_(s.query_start_loc[s.num_requests]) {
#if QUIRE_AMX
    tiles_ = !(path & kNoTiles) && amx_permitted() && l_.dtype == 1 && l_.head_dim % 32 == 0 && l_.v_dim % 32 == 0;
#endif
  }
  bool tiles() const { return tiles_; }  // for shared keys

  Plan make() {
    const SharedPrefixes shared(s_, sharing(), one_order_ ? 2 : std::max(2, 8 / s_.group()));
    size_t listed = num_tokens_;
    for (const SharedKeys& keys : shared.found()) for (int i : keys.requests) listed += s_.query_len(i);
    plan_.slots.assign(num_tokens_, 0);
    plan_.tokens.reserve(listed);  // tasks point into it: must not reallocate
    plan_.tokens.resize(num_tokens_);
    std::iota(plan_.tokens.begin(), plan_.tokens.end(), 0);
    std::vector<int> counts;  // wanted tokens of each request that takes the row path
    for (long i = 0; i < s_.num_requests; i++)
      if (by_rows(i)) counts.push_back(s_.query_start_loc[i + 1] - s_.first_wanted(i));
    const int at_once = tokens_at_once(counts);
    for (long i = 0; i < s_.num_requests; i++) {
      if (s_.query_len(i) <= 0) continue;
      if (by_rows(i)) own_by_rows(i, shared.own_begin(i), at_once);
      else own_by_splits(i, shared.own_begin(i));
    }
    for (const SharedKeys& keys : shared.found()) add_shared(keys);
    // An AMX task takes the KV heads of 16 query heads, a vector task all; fewer if threads would be idle.
    const long most = std::max(1, 16 / s_.group());
    cut_by_heads(plan_.decode, std::min(most, l_.num_kv_heads * long(plan_.decode.size()) / (2 * threads_)));
    cut_by_heads(plan_.vector, l_.num_kv_heads * long(plan_.vector.size()) / (4 * threads_));
    plan_.vector.insert(plan_.vector.begin(), rows_.begin(), rows_.end());
    return std::move(plan_);
  }

 private:
  bool by_decode_tiles(long i) const {
    return tiles_ && l_.cache == kLikeActivations && !one_order_ && s_.query_len(i) == 1 && s_.group() <= 16 &&
           l_.block_size % 16 == 0;
  }
  // True for requests with several tokens or with enough rows for AMX. Otherwise the token's keys are split.
  bool by_rows(long i) const {
    return one_order_ || s_.query_len(i) > 1 ||
           (tiles_ && l_.cache == kLikeActivations && s_.group() >= 8 && !by_decode_tiles(i));
  }

  // Returns the requests that may share keys. A long chunk has enough rows by itself, and a window may hide shared keys
  // from some tokens.
  std::vector<int> sharing() const {
    std::vector<int> requests;
    for (long i = 0; i < s_.num_requests; i++) {
      const int n = s_.query_len(i);
      if (n > 0 && n * s_.group() < 128 && s_.context_len(i) >= kSplit &&
          (l_.window <= 0 || s_.seq_lens[i] <= l_.window))
        requests.push_back(int(i));
    }
    return requests;
  }

  void own_by_rows(long i, long own_begin, int at_once) {
    const int start = s_.first_wanted(i), count = s_.query_start_loc[i + 1] - start;
    if (own_begin > 0)
      for (int token = s_.query_start_loc[i]; token < s_.query_start_loc[i + 1]; token++)
        plan_.slots[token] = plan_.num_slots++;
    const bool tiles = tiles_ && (one_order_ || own_begin > 0 || s_.query_len(i) * s_.group() >= 8);
    add_rows(tiles ? plan_.tiles : rows_, &plan_.tokens[start], count, at_once, [&](const int* tokens, int n) {
      return Task{tokens,
                  n,
                  s_.table(i),
                  0,
                  0,
                  std::max(own_begin, s_.first_key(s_.position[tokens[0]])),
                  s_.position[tokens[n - 1]] + 1,
                  own_begin > 0,
                  false};
    });
  }

  // Adds the splits of a request with one token, wanted or not.
  void own_by_splits(long i, long own_begin) {
    const int token = s_.query_start_loc[i], before = own_begin > 0;
    const long position = s_.position[token], begin = std::max(own_begin, s_.first_key(position)),
               first = begin / kSplit, last = position / kSplit;
    const bool keep = first < last || before;
    const long slot = plan_.slots[token] = plan_.num_slots;
    for (long split = first; split <= last; split++)
      (by_decode_tiles(i) ? plan_.decode : plan_.vector)
          .push_back({&plan_.tokens[token], 1, s_.table(i), 0, l_.num_kv_heads, std::max(split * kSplit, begin),
                      std::min((split + 1) * kSplit, position + 1), false, keep, slot + before + split - first});
    plan_.rows = std::max(plan_.rows, s_.group());
    if (!keep) return;
    plan_.num_slots += before + last + 1 - first;
    plan_.merges.push_back({token, slot, before + last + 1 - first});
  }

  void add_shared(const SharedKeys& keys) {
    const size_t first = plan_.tokens.size();
    for (int i : keys.requests)
      for (int token = s_.query_start_loc[i]; token < s_.query_start_loc[i + 1]; token++) plan_.tokens.push_back(token);
    const int count = int(plan_.tokens.size() - first);
    if (plan_.shared.size() <= size_t(keys.level)) plan_.shared.resize(keys.level + 1);
    add_rows(plan_.shared[keys.level], &plan_.tokens[first], count, tokens_at_once({count}),
             [&](const int* some, int n) {
               return Task{some, n, s_.table(keys.requests[0]), 0, 0, keys.begin, keys.end, keys.level > 0, true};
             });
  }

  // Returns the number of tokens per task of one KV head, for requests with `counts` tokens: as many as keep queries
  // and results in L2, so that keys are packed rarely; fewer if threads would be idle.
  int tokens_at_once(const std::vector<int>& counts) const {
    const int g = s_.group();
    long rows = (tiles_ ? 1024 : 384) / (l_.head_dim <= 128 ? 1 : l_.head_dim <= 256 ? 2 : 4);
    for (; rows >= 64; rows /= 2) {  // never below 32
      long tasks = 0;
      for (int count : counts) tasks += (count * g + rows - 1) / rows * l_.num_kv_heads;
      if (tasks >= 4L * threads_) break;
    }
    return std::max(1, int(rows / g));
  }

  template <typename F>
  void add_rows(std::vector<Task>& tasks, const int* tokens, int count, int at_once, F&& make) {
    // Tokens that see the most keys come first.
    for (int t = (count - 1) / at_once * at_once; t >= 0 && count > 0; t -= at_once)
      for (long h = 0; h < l_.num_kv_heads; h++) {
        tasks.push_back(make(tokens + t, std::min(at_once, count - t)));
        tasks.back().h0 = h, tasks.back().h1 = h + 1;
        plan_.rows = std::max(plan_.rows, tasks.back().count * s_.group());
      }
  }

  void cut_by_heads(std::vector<Task>& tasks, long each) const {
    std::vector<Task> cut;
    for (Task task : tasks)
      for (task.h0 = 0; task.h0 < l_.num_kv_heads; task.h0 = task.h1) {
        task.h1 = std::min(task.h0 + std::max(1L, each), l_.num_kv_heads);
        cut.push_back(task);
      }
    tasks.swap(cut);
  }

  const Step& s_;
  const Layer& l_;
  const int threads_;
  const bool one_order_;
  const int num_tokens_;
  bool tiles_ = false;
  Plan plan_;
  std::vector<Task> rows_;  // first part of plan_.vector
};

constexpr int kFixedRowsFrom = 32;  // minimum rows for which the conversion to integers pays off

// Fixed-point numbers pack keys and values of these types.
template <typename T> constexpr bool kFixable = std::is_same_v<T, bf16> || kScaled<T>;
template <typename T> using Fixable = std::conditional_t<kFixable<T>, T, bf16>;

template <typename T, typename C>
size_t vector_bytes(const Step& s, int rows) {
  const long d = s.layer.head_dim, dv = s.layer.v_dim;
  const size_t of_token = s.group() <= FloatTiles<T, C, false>::kFewRows ? token_bytes(s.layer.num_heads, d, dv) : 0;
  return of_token + state_bytes(rows, dv) +
         std::max(FloatTiles<T, C, true>::bytes(rows, d, dv), FixedTiles<Fixable<C>>::bytes(rows, d, dv));
}

// Runs a task with vectors, in fixed point or in floats depending on its number of rows.
template <typename T, typename C>
void attend_vector(const Step& s, const Task& t, const Task* following, const Partials& partials, const Plan& plan,
                   bool one_order, char* memory) {
  if constexpr (kFastWords && std::is_same_v<T, bf16> && kFixable<C>)
    if (!one_order && t.count * s.group() >= kFixedRowsFrom && s.layer.head_dim % 32 == 0 && s.layer.v_dim % 32 == 0 &&
        (!s.layer.two_scales() || s.layer.v_dim % kFixedRun == 0))
      return attend_rows<T, C, FixedTiles<C>>(s, t, following, partials, plan.slots.data(), memory);
  (one_order ? attend_rows<T, C, FloatTiles<T, C, true>>
             : attend_rows<T, C, FloatTiles<T, C, false>>)(s, t, following, partials, plan.slots.data(), memory);
}

template <typename T>
void merge(const Step& s, const Merge& t, const Partials& partials) {
  const long d = s.layer.v_dim;
  for (long head = 0; head < s.layer.num_heads; head++) {
    float top = kNegInf, sum = 0;
    for (long c = 0; c < t.count; c++) top = std::max(top, *partials.at(t.first + c, head).m);
    alignas(64) float acc[512] = {};
    for (long c = 0; c < t.count; c++) {
      const Partial part = partials.at(t.first + c, head);
      const float w = std::exp2(*part.m - top);
      sum += w * reduce_add(load(part.l));
      for (long i = 0; i < d; i += 16) store(acc + i, fma(set1(w), load(part.acc + i), load(acc + i)));
    }
    write_row((T*)s.out + t.token * s.ldo + head * d, acc, s.layer.with_sink(head, top, sum), d);
  }
}

thread_local Scratch memory, partial_memory;

template <typename T, typename C>
void run(const Step& s, int path) {
  Planner planner(s, Pool::get().threads(), path);
  const Plan plan = planner.make();
  const Layer& l = s.layer;
  Partials partials{nullptr, l.num_heads, l.v_dim};
  partials.base = (float*)partial_memory.get(plan.num_slots * partials.floats() * sizeof(float));
  auto run_tiles = [&](const std::vector<Task>& tasks, Queue& queue) {
#if QUIRE_AMX
    if (tasks.empty()) return;
    TileScope tiles;
    char* own = (char*)memory.get(FlashScratch::bytes((plan.rows + 31) / 32 * 32, l.head_dim, l.v_dim));
    for (long i; queue.take(i);) attend_flash(s, tasks[i], partials, plan.slots.data(), own);
#endif
  };
  auto run_decode = [&](Queue& queue) {
#if QUIRE_AMX
    if (plan.decode.empty()) return;
    char* own = (char*)memory.get(DecodeScratch::bytes(l.head_dim));
    for (long i; queue.take(i);) attend_decode(s, plan.decode[i], partials, own);
#endif
  };
  auto run_vector = [&](const std::vector<Task>& tasks, Queue& queue) {
    char* own = (char*)memory.get(vector_bytes<T, C>(s, plan.rows));
    long i, next;
    ReadAhead<C> ahead;
    for (bool more = queue.take(i); more; i = next) {
      // Near the end of the queue, a task is not taken early: another thread may be free sooner.
      const bool known = queue.end - i > 4 * Pool::get().threads() && queue.take(next);
      const Task& t = tasks[i];
      const Task* following = known ? &tasks[next] : nullptr;
      if (!(path & kOneOrder) && is_of_token<T, C>(s, t)) {
        ahead.enter(s.layer, t, following && is_of_token<T, C>(s, *following) ? following : nullptr);
        attend_token<T, C>(s, t, partials, ahead, own);
      } else {
        attend_vector<T, C>(s, t, following, partials, plan, path & kOneOrder, own);
      }
      more = known || queue.take(next);
    }
  };
  for (const std::vector<Task>& tasks : plan.shared) {
    Queue queue(tasks.size());
    Pool::get().run([&] { planner.tiles() ? run_tiles(tasks, queue) : run_vector(tasks, queue); });
  }
  Queue tiles(plan.tiles.size()), decode(plan.decode.size()), vector(plan.vector.size());
  Pool::get().run([&] {
    run_tiles(plan.tiles, tiles);
    run_decode(decode);
    run_vector(plan.vector, vector);
  });
  parallel_for(long(plan.merges.size()), 4, [&](long i) { merge<T>(s, plan.merges[i], partials); });
}

// Computes the attention of a step (see quire_paged_attention) over a cache of type C, or of the queries' type.
template <typename C>
void attend_step(const Layer* layer, const void* q, long ldq, void* out, long ldo, const int* block_table,
                 long ld_table, const int* seq_lens, const int* query_start_loc, long num_requests, int path,
                 const long* wanted, long num_wanted) {
  Step s{*layer, q, out, ldq, ldo, block_table, ld_table, seq_lens, query_start_loc, num_requests, wanted, num_wanted};
  for (long i = 0; i < num_requests; i++)
    for (int t = 0; t < s.query_len(i); t++) s.position.push_back(s.context_len(i) + t);
  constexpr bool own = std::is_same_v<C, void>;
  if (layer->dtype == 0) run<float, std::conditional_t<own, float, C>>(s, path);
  else if (layer->dtype == 1) run<bf16, std::conditional_t<own, bf16, C>>(s, path);
  else run<f16, std::conditional_t<own, f16, C>>(s, path);
}

}  // namespace
