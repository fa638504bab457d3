// Attention of one token with a few query heads per KV head, over at most 128 keys of several KV heads.
//
// The keys of all heads are read 32 at a time, then the values, so that memory is read nearly in order: blocks of the
// cache lie anywhere in memory, and a core that reads them head by head gets half of the bandwidth.
#pragma once

#include "attention_rows.h"

namespace {

// Prefetches the keys of a task, of all heads, then the values, then those of the thread's next task.
template <typename T>
class ReadAhead {
 public:
  const KeyBlock<T>& keys() const { return blocks_[now_]; }

  // Begins with a task. following: the thread's next one; null: not known, or of another kind.
  void enter(const Layer& l, const Task& t, const Task* following) {
    if (expected_ == &t) {
      now_ = !now_, part_ -= 2;
    } else {
      locate(l, t, blocks_[now_]);
      // of a row: all heads of a key or, where those of a head are adjacent, of a block of them
      step_ = l.k_head == l.head_dim ? 1 : int(l.block_size);
      bytes_ = row_bytes(l, t), part_ = -1, row_ = 0, end_ = 0, left_ = 0;
    }
    const bool first = expected_ != &t;
    expected_ = following && row_bytes(l, *following) == bytes_ ? following : nullptr;
    if (expected_) locate(l, *following, blocks_[!now_]);
    if (first) fetch(kAhead / 64 / 2, 0);
  }

  // Prefetches the next 2 * lines cache lines. Inline, and without a call that uses vector registers, because it is
  // called where all of them are in use.
  __attribute__((always_inline)) void fetch(int lines, int) {
    for (int i = 0; i < 2 * lines; i++) {
      if (left_ <= 0) {
        if ((row_ += step_) < end_) at_ = (const char*)rows_[row_], left_ = bytes_;
        else if (!next_part()) return;
      }
      prefetch_ahead(at_);
      at_ += 64, left_ -= 64;
    }
  }

 private:
  static constexpr int kAhead = 64 << 10;
  // To L2, fetches overlap with the products. Relative to L1, Zen 4 decodes 1.3 x as fast with AVX-512 (bf16, int8) and
  // 1.4 x with AVX2 (int8; one thread, contexts of 8,192 and 16,384); Zen 5 took up to 1.1 x as long.
  __attribute__((always_inline)) static void prefetch_ahead(const char* line) {
#if defined(__x86_64__) && !defined(__AMX_TILE__)
    prefetch_l2(line);
#else
    prefetch_l1(line);
#endif
  }
  static int row_bytes(const Layer& l, const Task& t) { return int((t.h1 - t.h0) * l.k_head * sizeof(T)); }
  static void locate(const Layer& l, const Task& t, KeyBlock<T>& block) {
    block.locate(l, t.table, t.h0, t.begin / kKeys * kKeys, t.begin, t.end);
    if constexpr (kScaled<T>)
      for (long at = t.begin; at < t.end; at++) {
        const long id = t.table[at / l.block_size], slot = at % l.block_size;
        prefetch_l2(l.k_scales.at(id, slot, t.h0));
        prefetch_l2(l.v_scales.at(id, slot, t.h0));
      }
  }
  __attribute__((noinline)) bool next_part() {
    if (part_ >= (expected_ ? 3 : 1)) return false;
    const KeyBlock<T>& block = blocks_[++part_ < 2 ? now_ : !now_];
    rows_ = part_ % 2 ? block.v : block.k, row_ = block.begin / step_ * step_, end_ = block.end;
    at_ = (const char*)rows_[row_], left_ = bytes_;
    return true;
  }

  KeyBlock<T> blocks_[2];
  int now_ = 0;
  const Task* expected_ = nullptr;  // the next task, of which blocks_[!now_] has the keys
  int part_ = 0;                    // keys, values, keys of the next task, its values
  int row_ = 0, end_ = 0, left_ = 0, bytes_ = 0, step_ = 1;
  const T* const* rows_ = nullptr;
  const char* at_ = nullptr;
};

constexpr size_t token_bytes(long heads, long d, long dv) {
  return heads * (padded(dv) + kKeys + d + 16) * sizeof(float);
}

// Whether attend_token can run the task.
template <typename Q, typename T>
bool is_of_token(const Step& s, const Task& t) {
  const Layer& l = s.layer;
  return t.count == 1 && t.h1 - t.h0 > 1 && !t.resume && (t.end - 1) / kKeys == t.begin / kKeys &&
         s.group() <= FloatTiles<Q, T, false>::kFewRows && !l.two_scales() && l.head_dim == l.v_dim &&
         l.k_head == l.v_head &&
         (l.k_head == l.head_dim || (l.k_head == l.block_size * l.k_slot && l.k_slot == l.head_dim));
}

// Like attend_rows. memory: token_bytes of the task's query heads.
template <typename Q, typename T>
void attend_token(const Step& s, const Task& t, const Partials& partials, ReadAhead<T>& ahead, char* memory) {
  const Layer& l = s.layer;
  const int g = s.group(), heads = int(t.h1 - t.h0), rows = heads * g;
  const long d = l.head_dim, ld = padded(d), key = t.begin / kKeys * kKeys, position = s.position[*t.tokens];
  float *acc = (float*)memory, *x = acc + rows * ld, *queries = x + rows * kKeys;
  std::vector<FloatTiles<Q, T, false>> tiles;
  tiles.reserve(heads);
  for (int h = 0; h < heads; h++) {
    tiles.push_back(FloatTiles<Q, T, false>::without_tiles(queries + h * g * (d + 16), g, d, d));
    tiles[h].queries([&](int r) { return (const Q*)s.q + *t.tokens * s.ldq + ((t.h0 + h) * g + r) * d; });
  }
  KeyBlock<T> block = ahead.keys();
  const int steps = int((t.end - key + 31) / 32);
  const T* of_head[32];
  const auto each = [&](const T* const* of_first, auto&& f) {  // for 32 keys of each head
    for (int b = 0; b < steps; b++)
      for (int h = 0; h < heads; h++) {
        for (int j = 0; j < 32; j++) of_head[j] = of_first[b * 32 + j] + h * l.k_head;
        f(h, h * g * kKeys + b * 32);
      }
  };
  each(block.k, [&](int h, int at) { tiles[h].score_few_rows(of_head, x + at, ahead); });
  std::vector<float> m(rows, kNegInf), sum(rows, 0.f);
  for (int h = 0; h < heads; h++) {
    alignas(64) float k_scales[kKeys], v_scales[kKeys];
    float* of = x + h * g * kKeys;
    if constexpr (kScaled<T>) {
      block.head = t.h0 + h;
      block.scales(l, l.k_scales, k_scales), block.scales(l, l.v_scales, v_scales);
      multiply_columns(of, g, steps, k_scales);
    }
    for (int r = 0; r < g; r++)
      weigh_steps(l, steps, of + r * kKeys, std::max(t.begin, s.first_key(position)) - key,
                  std::min(t.end, position + 1) - key, m[h * g + r], sum[h * g + r]);
    if constexpr (kScaled<T>) multiply_columns(of, g, steps, v_scales);
  }
  std::fill(acc, acc + rows * ld, 0.f);
  each(block.v, [&](int h, int at) { tiles[h].add_few_rows(of_head, x + at, acc + h * g * ld, ahead); });
  for (int r = 0; r < rows; r++) {
    const long head = t.h0 * g + r;
    if (!t.keep) {
      write_row((Q*)s.out + *t.tokens * s.ldo + head * d, acc + r * ld, l.with_sink(head, m[r], sum[r]), d);
      continue;
    }
    const Partial to = partials.at(t.slot, head);
    std::copy(acc + r * ld, acc + r * ld + d, to.acc);
    store(to.l, zero());
    *to.l = sum[r], *to.m = m[r];
  }
}

}  // namespace
