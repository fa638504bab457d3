// Causal attention over a paged KV cache, for decode, prefill, chunks of it, and any mixture in one call. Keys and values are read where they lie.
//
// bf16 goes by AMX tiles: prefill (attention_tiles.h), and decode with up to 16 query heads per KV head (attention_decode.h). The rest goes by vectors
// (attention_vector.h), bf16 without AVX-512 in a way of its own (attention_avx2.h). Keys that several requests share are read once for all of them (attention_share.h).
//
// Key ranges start at absolute multiples of kSplit and partial results are folded in order, so neither the batch nor the
// number of threads changes a token's result as long as it goes the same way: by tiles, or by vectors, where a token among
// several is summed as one alone. It does if `path` says which way (sharing keys changes no bit then), and with AVX-512 and
// no AMX, where there is one way. With path 0 and AMX shared keys go the way of prefill, and with AVX2 alone many rows are
// fixed-point numbers, of which the values are rounded beside those of the other keys of a task.
#include <numeric>

#include "attention.h"
#include "attention_avx2.h"
#include "attention_decode.h"
#include "attention_share.h"
#include "attention_tiles.h"
#include "attention_vector.h"
#include "parallel.h"

namespace {

struct VectorTask {
  const int* tokens;
  int count;
  const int* table;  // where the keys [begin, end) lie
  long begin, end;
  bool keep;             // as partial results; else this is the end
  long slot = -1;        // for keys that are shared: where, among the slots of each token
  bool by_rows = false;  // as products of tiles
  long h0 = 0, h1 = 0;
};

struct Merge {  // the partial results of a token, in slots that follow each other
  int token;
  long first, count;
};

struct Plan {
  std::vector<int> tokens;  // all of the step in order, then for each shared prefix its tokens
  std::vector<long> slots;  // of each token: the one for split 0, split 1 is in the next. Less than 0 if the first splits have none.
  std::vector<long> shared_slots;  // of each token: the first one for shared keys; those for splits of its own come behind
  long num_slots = 0;
  std::vector<VectorTask> vector;
  int vector_tokens = 1;  // of the largest task
  std::vector<Merge> merges;
#if QUIRE_AMX
  std::vector<DecodeTask> decode;
  std::vector<std::vector<FlashTask>> flash_levels;  // shared keys, level by level: each goes on from the results of those before
  std::vector<FlashTask> flash;                      // each request's own keys
  int flash_rows = 0;                                // of the largest task
#endif
};

constexpr int kTokensAtOnce = 4;    // of a prefill on the vector path
constexpr int kTokensSharing = 16;  // of a task of shared keys there
constexpr int kRowsAtOnce = 384;    // of both, where they are products of tiles

class Planner {
 public:
  Planner(const Step& s, int threads, int path) : s_(s), l_(s.layer), threads_(threads), path_(path), num_tokens_(s.query_start_loc[s.num_requests]) {
#if QUIRE_AMX
    tiles_ = path != 1 && amx_permitted() && l_.dtype == 1 && l_.head_dim % 32 == 0;
#endif
    plan_.slots.assign(num_tokens_, 0);
    plan_.shared_slots.assign(num_tokens_, 0);
#if !defined(__AVX512F__)
    by_rows_ = path == 0 && l_.dtype == 1 && l_.head_dim % 32 == 0;
    own_tokens_ = tokens_at_once(kRowsAtOnce, several_wanted());
#endif
  }

  Plan make() {
    const SharedPrefixes shared = share();
    size_t listed = num_tokens_;
    for (const SharedKeys& keys : shared.found()) for (int i : keys.requests) listed += s_.query_len(i);
    plan_.tokens.reserve(listed);  // tasks point into it
    plan_.tokens.resize(num_tokens_);
    std::iota(plan_.tokens.begin(), plan_.tokens.end(), 0);
    for (long i = 0; i < s_.num_requests; i++) {
      if (s_.query_len(i) <= 0) continue;
      if (by_tiles(i, shared.own_begin(i))) give_state(i, shared.own_begin(i));
      else own_by_vectors(i, shared);
    }
    for (const SharedKeys& keys : shared.found()) add_shared(keys);
#if QUIRE_AMX
    own_by_tiles(shared);
    const long most = std::max(1, 16 / s_.group()), decode_heads = std::min(most, std::max(1L, l_.num_kv_heads * long(plan_.decode.size()) / (2 * threads_)));
    cut_by_heads(plan_.decode, [&](const DecodeTask&) { return decode_heads; });  // as many KV heads as have 16 query heads, fewer where that would leave threads idle
#endif
    const long vector_heads = std::max(1L, l_.num_kv_heads * long(plan_.vector.size()) / (4 * threads_));  // all, fewer where that would leave threads idle
    cut_by_heads(plan_.vector, [&](const VectorTask& t) { return t.by_rows ? 1 : vector_heads; });
    return std::move(plan_);
  }

 private:
  // Several tokens on the vector path take all their keys in one task, which cannot go on from shared ones.
  bool by_tiles(long i, long own_begin) const {
    const int n = s_.query_len(i);
    return tiles_ && (path_ == 2 || (n * s_.group() >= 8 && !by_decode_tiles(i)) || (n > 1 && own_begin > 0));
  }

  bool by_decode_tiles(long i) const { return tiles_ && path_ == 0 && s_.query_len(i) == 1 && s_.group() <= 16 && l_.block_size % 16 == 0; }

  // A long chunk has rows enough of its own, and a window may hide shared keys from some.
  SharedPrefixes share() const {
    std::vector<int> requests;
    for (long i = 0; i < s_.num_requests; i++) {
      const int n = s_.query_len(i);
      const bool few = tiles_ ? n * s_.group() < 128 : n == 1;
      if (n > 0 && few && s_.context_len(i) >= kSplit && (l_.window <= 0 || s_.seq_lens[i] <= l_.window)) requests.push_back(int(i));
    }
    // By rows a task takes all shared keys, fewer where that would leave threads idle; else one split, so that a token's result is the same whoever shares its keys.
    const long parts = by_rows_ ? (4 * threads_ + l_.num_kv_heads - 1) / l_.num_kv_heads : LONG_MAX / kSplit;
    return SharedPrefixes(s_, std::move(requests), tiles_ && path_ == 0 ? std::max(2, 8 / s_.group()) : 2, parts);
  }

  // Slots for the results of the shared keys of a request that goes by tiles.
  void give_state(long i, long own_begin) {
#if QUIRE_AMX
    if (own_begin == 0) return;
    for (int token = s_.query_start_loc[i]; token < s_.query_start_loc[i + 1]; token++) plan_.shared_slots[token] = plan_.num_slots++;
#endif
  }

  void own_by_vectors(long i, const SharedPrefixes& shared) {
    const long own_begin = shared.own_begin(i);
    const bool several = s_.query_len(i) > 1;  // one token alone may have slots, whether it is wanted or not
    const int start = several ? s_.first_wanted(i) : s_.query_start_loc[i], n = s_.query_start_loc[i + 1] - start, most = by_rows_ ? own_tokens_ : kTokensAtOnce;
    if (n == 0) return;
    for (int t = (n - 1) / most * most; t >= 0; t -= most) {
      const int count = std::min(most, n - t);
      const int* tokens = &plan_.tokens[start + t];
      const long begin = std::max(own_begin, s_.first_key(s_.position[start + t])), end = s_.position[start + t + count - 1] + 1;
      const long first = begin / kSplit, last = (end - 1) / kSplit;
      if (several || (first == last && own_begin == 0)) {
        add_own(i, tokens, count, begin, end, false);
        continue;
      }
      // Before the slots of the own splits are those of shared keys: by tiles there is one, by vectors one for each part.
      const long first_slot = own_begin == 0 ? first : first - (tiles_ ? 1 : shared.slots(i));
      plan_.slots[start] = plan_.num_slots - first_slot;
      plan_.shared_slots[start] = plan_.num_slots;
      plan_.merges.push_back({start, plan_.num_slots, last + 1 - first_slot});
      plan_.num_slots += last + 1 - first_slot;
      for (long split = first; split <= last; split++) add_own(i, tokens, 1, std::max(split * kSplit, begin), std::min((split + 1) * kSplit, end), true);
    }
  }

  void add_own(long i, const int* tokens, int count, long begin, long end, bool keep) {
#if QUIRE_AMX
    if (by_decode_tiles(i)) return plan_.decode.push_back({*tokens, s_.table(i), 0, l_.num_kv_heads, begin, end, keep});
#endif
    add_vector({tokens, count, s_.table(i), begin, end, keep});
  }

  // How many tokens a task of one KV head takes, for requests of so many: those of `rows` rows, fewer where that would leave threads idle.
  int tokens_at_once(long rows, const std::vector<int>& counts) const {
    const int g = s_.group();
    for (; rows >= 64; rows /= 2) {  // 32 and more remain
      long tasks = 0;
      for (int count : counts) tasks += (count * g + rows - 1) / rows * l_.num_kv_heads;
      if (tasks >= 4L * threads_) break;
    }
    return std::max(1, int(rows / g));
  }

  // Of the requests with several tokens, each.
  std::vector<int> several_wanted() const {
    std::vector<int> counts;
    for (long i = 0; i < s_.num_requests; i++) if (s_.query_len(i) > 1) counts.push_back(s_.query_start_loc[i + 1] - s_.first_wanted(i));
    return counts;
  }

  void add_vector(const VectorTask& task) {
    plan_.vector.push_back(task);
#if !defined(__AVX512F__)
    plan_.vector.back().by_rows = by_rows_ && task.count * s_.group() >= kMostRows;
#endif
    plan_.vector_tokens = std::max(plan_.vector_tokens, task.count);
  }

  void add_shared(const SharedKeys& keys) {
    const size_t first = plan_.tokens.size();
    for (int i : keys.requests)
      for (int token = s_.query_start_loc[i]; token < s_.query_start_loc[i + 1]; token++) plan_.tokens.push_back(token);
    const int *tokens = &plan_.tokens[first], count = int(plan_.tokens.size() - first), *table = s_.table(keys.requests[0]);
#if QUIRE_AMX
    if (tiles_) {
      if (plan_.flash_levels.size() <= size_t(keys.level)) plan_.flash_levels.resize(keys.level + 1);
      add_flash(plan_.flash_levels[keys.level], tokens, count, flash_tokens({count}),
                [&](const int* some, int n) { return FlashTask{some, n, table, 0, keys.begin, keys.end, keys.level > 0, true}; });
      return;
    }
#endif
    const int most = by_rows_ ? tokens_at_once(kRowsAtOnce, {count}) : kTokensSharing;
    for (long slot = keys.slot, key = keys.begin; key < keys.end; key += keys.step, slot++)
      for (int t = 0; t < count; t += most) add_vector({tokens + t, std::min(most, count - t), table, key, std::min(key + keys.step, keys.end), true, slot});
  }

  // heads(task): that it is cut in pieces of.
  template <typename Task, typename F>
  void cut_by_heads(std::vector<Task>& tasks, F&& heads) const {
    std::vector<Task> cut;
    for (Task task : tasks) {
      const long each = heads(task);
      for (task.h0 = 0; task.h0 < l_.num_kv_heads; task.h0 += each) {
        task.h1 = std::min(task.h0 + each, l_.num_kv_heads);
        cut.push_back(task);
      }
    }
    tasks.swap(cut);
  }

#if QUIRE_AMX
  // 256 to 1024 rows, whose queries and values stay in L2, so that keys are packed rarely.
  int flash_tokens(const std::vector<int>& counts) const {
    return tokens_at_once(l_.head_dim <= 128 ? 1024 : l_.head_dim <= 256 ? 512 : 256, counts);
  }

  template <typename F>
  void add_flash(std::vector<FlashTask>& tasks, const int* tokens, int count, int at_once, F&& make) {
    for (int t = (count - 1) / at_once * at_once; t >= 0; t -= at_once)  // those that see most keys first
      for (long h = 0; h < l_.num_kv_heads; h++) {
        tasks.push_back(make(tokens + t, std::min(at_once, count - t)));
        tasks.back().head = h;
        plan_.flash_rows = std::max(plan_.flash_rows, (tasks.back().count * s_.group() + 31) / 32 * 32);
      }
  }

  void own_by_tiles(const SharedPrefixes& shared) {
    std::vector<int> counts;
    for (long i = 0; i < s_.num_requests; i++) counts.push_back(s_.query_len(i) > 0 && by_tiles(i, shared.own_begin(i)) ? s_.query_start_loc[i + 1] - s_.first_wanted(i) : 0);
    const int at_once = flash_tokens(counts);
    for (long i = 0; i < s_.num_requests; i++) {
      const long own_begin = shared.own_begin(i);
      if (counts[i] == 0) continue;
      add_flash(plan_.flash, &plan_.tokens[s_.query_start_loc[i + 1] - counts[i]], counts[i], at_once, [&](const int* tokens, int n) {
        return FlashTask{tokens, n, s_.table(i), 0, std::max(own_begin, s_.first_key(s_.position[tokens[0]])), s_.position[tokens[n - 1]] + 1, own_begin > 0, false};
      });
    }
  }
#endif

  const Step& s_;
  const Layer& l_;
  const int threads_, path_, num_tokens_;
  bool tiles_ = false, by_rows_ = false;  // tasks of several rows are products of tiles, by AMX or by vectors
  int own_tokens_ = 0;                    // of a task by rows
  Plan plan_;
};

// Room for a task's state and whatever the ways to compute it need besides.
size_t vector_bytes(const Step& s, const Plan& plan) {
  const long rows = s.layer.num_heads * plan.vector_tokens, d = s.layer.head_dim;
#if defined(__AVX512F__)
  return 2 * State::floats(rows, d) * sizeof(float);
#else
  const int task_rows = plan.vector_tokens * s.group();
  return 2 * State::floats(rows, d) * sizeof(float) + std::max({FewRows::bytes(rows, d), FloatTiles::bytes(task_rows, d), FixedTiles::bytes(task_rows, d)});
#endif
}

// A task's rows to `state`, the way that suits them.
template <typename T>
void attend(const Step& s, const VectorTask& t, State state, char* memory) {
#if !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bf16>) {
    const auto by_rows = t.count * s.group() >= kFixedAttentionRows ? attend_rows<FixedTiles> : attend_rows<FloatTiles>;
    (t.by_rows ? by_rows : attend_vector<T, FewRows>)(s, t.table, t.tokens, t.count, t.h0, t.h1, t.begin, t.end, state, memory);
    return;
  }
#endif
  attend_vector<T, AnyRows<T>>(s, t.table, t.tokens, t.count, t.h0, t.h1, t.begin, t.end, state, memory);
}

// The softmax over some keys goes on with that over later ones: l and m are the sums and maxima of `acc`, of which keys that are all masked have none.
inline void fold(float* acc, float& l, float& m, const float* acc1, float l1, float m1, long d) {
  if (m1 == kNegInf) return;
  const float top = std::max(m, m1), w = m == kNegInf ? 0.f : std::exp2(m - top), w1 = std::exp2(m1 - top);
  l = std::fma(w1, l1, w * l);
  m = top;
  for (long i = 0; i < d; i += 16) store(acc + i, fma(set1(w1), load(acc1 + i), load(acc + i) * set1(w)));
}

// A task's rows to `total`, a split at a time, so that a token of several has the same sums as one alone, whose splits are tasks that `merge` folds.
template <typename T>
void attend_splits(const Step& s, VectorTask t, long rows, State total, State part, char* memory) {
  const long d = s.layer.head_dim, end = t.end;
  for (bool first = true; t.begin < end; t.begin = t.end, first = false) {
    t.end = std::min((t.begin / kSplit + 1) * kSplit, end);
    State state = first ? total : part;
    state.clear(rows, d);
    attend<T>(s, t, state, memory);
    for (long r = 0; !first && r < rows; r++) fold(total.acc + r * d, total.l[r], total.m[r], part.acc + r * d, part.l[r], part.m[r], d);
  }
}

template <typename T>
void run_vector(const Step& s, const VectorTask& t, float* own, const Partials& partials, const Plan& plan) {
  const long d = s.layer.head_dim;
  const int g = s.group();
  const long rows = (t.h1 - t.h0) * t.count * g;
  State state(own, rows), part(own + State::floats(rows, d), rows);
  char* memory = (char*)(own + 2 * State::floats(rows, d));
  if (t.by_rows) {
    state.clear(rows, d);
    attend<T>(s, t, state, memory);
  } else {
    attend_splits<T>(s, t, rows, state, part, memory);
  }
  for (long r = 0; r < rows; r++) {
    const long head = (t.h0 + r / (t.count * g)) * g + r % g, token = t.tokens[r % (t.count * g) / g];
    const float* acc = state.acc + r * d;
    if (!t.keep) {
      write_row((T*)s.out + token * s.ldo + head * d, acc, state.l[r], d);
      continue;
    }
    const Partial to = partials.at(t.slot < 0 ? plan.slots[token] + t.begin / kSplit : plan.shared_slots[token] + t.slot, head);
    std::copy(acc, acc + d, to.acc);
    store(to.l, zero());
    *to.l = state.l[r];
    *to.m = state.m[r];
  }
}

template <typename T>
void merge(const Step& s, const Merge& t, const Partials& partials) {
  const long d = s.layer.head_dim;
  for (long head = 0; head < s.layer.num_heads; head++) {
    float top = kNegInf, sum = 0;
    alignas(64) float acc[512] = {};
    for (long c = 0; c < t.count; c++) {
      const Partial part = partials.at(t.first + c, head);
      fold(acc, sum, top, part.acc, reduce_add(load(part.l)), *part.m, d);
    }
    write_row((T*)s.out + t.token * s.ldo + head * d, acc, sum, d);
  }
}

thread_local Scratch memory, partial_memory;

template <typename T>
void run(const Step& s, int path) {
  const Plan plan = Planner(s, Pool::get().threads(), path).make();
  const Layer& l = s.layer;
  Partials partials{nullptr, l.num_heads, l.head_dim};
  partials.base = (float*)partial_memory.get(plan.num_slots * partials.floats() * sizeof(float));
#if QUIRE_AMX
  auto run_flash = [&](const std::vector<FlashTask>& tasks, Queue& queue) {
    if (tasks.empty()) return;
    TileScope tiles;
    char* own = (char*)memory.get(FlashScratch::bytes(plan.flash_rows, l.head_dim));
    for (long i; queue.take(i);) attend_flash(s, tasks[i], partials, plan.shared_slots.data(), own);
  };
  for (const std::vector<FlashTask>& tasks : plan.flash_levels) {
    Queue queue(tasks.size());
    Pool::get().run([&] { run_flash(tasks, queue); });
  }
  auto run_decode = [&](Queue& queue) {
    if (plan.decode.empty()) return;
    char* own = (char*)memory.get(DecodeScratch::bytes(l.head_dim));
    for (long i; queue.take(i);) attend_decode(s, plan.decode[i], partials, plan.slots[plan.decode[i].token] + plan.decode[i].begin / kSplit, own);
  };
  Queue flash_queue(plan.flash.size()), decode_queue(plan.decode.size());
#endif
  Queue vector_queue(plan.vector.size());
  Pool::get().run([&] {
#if QUIRE_AMX
    run_flash(plan.flash, flash_queue);
    run_decode(decode_queue);
#endif
    float* own = (float*)memory.get(vector_bytes(s, plan));
    for (long i; vector_queue.take(i);) run_vector<T>(s, plan.vector[i], own, partials, plan);
  });
  parallel_for(long(plan.merges.size()), 4, [&](long i) { merge<T>(s, plan.merges[i], partials); });
}

}  // namespace

extern "C" {

// q, out: [tokens, num_heads, head_dim], the last two dimensions contiguous. head_dim is a multiple of 16, at most 512 (AMX: of 32).
// path: 0 automatic, 1 vector, 2 AMX for every request. wanted, if not null: the tokens whose results are read, ascending; those of others may be left out.
void quire_paged_attention(const Layer* layer, const void* q, long ldq, void* out, long ldo, const int* block_table, long ld_table, const int* seq_lens,
                           const int* query_start_loc, long num_requests, int path, const long* wanted, long num_wanted) {
  Step s{*layer, q, out, ldq, ldo, block_table, ld_table, seq_lens, query_start_loc, num_requests, wanted, num_wanted};
  for (long i = 0; i < num_requests; i++)
    for (int t = 0; t < s.query_len(i); t++) s.position.push_back(s.context_len(i) + t);
  if (layer->dtype == 0) run<float>(s, path);
  else if (layer->dtype == 1) run<bf16>(s, path);
  else run<f16>(s, path);
}
}
