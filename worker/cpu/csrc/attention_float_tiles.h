// Products of rows with tiles of keys and values in float32.
#pragma once

#include "attention_few.h"

namespace {

// Computes sums[r * ld + column] += the sum over k < count of x[r * R + k * K] * tile[k][column], for ROWS rows and the
// 32 columns of a tile. Tiles are contiguous along k.
template <int ROWS, int R, int K>
void tile_products(const float* x, const float* tile, int count, float* sums, long ld) {
  constexpr int WIDTH = ROWS <= kRowsOfAll ? 32 / kLanes : 2;  // registers per row
  for (int c = 0; c < 32; c += WIDTH * kLanes) {
    Floats acc[ROWS * WIDTH];
    unrolled<ROWS * WIDTH>([&](auto i) __attribute__((always_inline)) {
      acc[i] = load_floats(sums + i / WIDTH * ld + c + i % WIDTH * kLanes);
    });
    const float *at = x, *w = tile + c;
    for (int k = 0; k < count; k++, at += K, w += 32) {
      Floats v[WIDTH];
      unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) { v[i] = load_floats(w + i * kLanes); });
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        const Floats one = set1_floats(at[r * R]);
        unrolled<WIDTH>(
            [&](auto i) __attribute__((always_inline)) { acc[r * WIDTH + i] = fma(v[i], one, acc[r * WIDTH + i]); });
      });
    }
    unrolled<ROWS * WIDTH>([&](auto i) __attribute__((always_inline)) {
      store_floats(sums + i / WIDTH * ld + c + i % WIDTH * kLanes, acc[i]);
    });
  }
}

constexpr long padded(long d) { return (d + 31) / 32 * 32; }

// The arithmetic of attend_rows in floats, for the rows of queries (of type Q) and 128 keys and values (of type T) of a
// KV head. Keys with two scales are multiplied by them here; other scales are left to attend_rows.
template <typename Q, typename T, bool ONE_ORDER>
class FloatTiles {
 public:
  static size_t bytes(long rows, long d, long dv) {
    return (rows * d + 16 + kKeys * (padded(d) + padded(dv))) * sizeof(float);
  }
  FloatTiles(char* memory, int rows, long d, long dv, bool two_scales)
        : rows_(rows), d_(d), dv_(dv), two_scales_(two_scales), k_((float*)memory), v_(k_ + kKeys * padded(d)),
          q_(v_ + kKeys * padded(dv)) {}

  int groups() const { return (rows_ + kMostRows - 1) / kMostRows; }
  int begin(int group) const { return int(long(rows_) * group / groups()); }
  int size(int group) const { return begin(group + 1) - begin(group); }

  template <typename F>
  void queries(F&& row) {
    if (by_bytes()) {
      of_rows(rows_, [&](auto n) {
        if constexpr (n <= kFewRows) bytes_.fill(q_, n, d_, row);
      });
      return;
    }
    if (by_pairs()) {
      for (int r = 0; r < rows_; r++) memcpy((char*)q_ + r * d_ * sizeof(Q), row(r), d_ * sizeof(Q));
      return;
    }
    for (int i = 0; i < groups(); i++) {
      float* to = q_ + begin(i) * d_;
      for (int r = 0, n = size(i); r < n; r++) {
        const Q* from = row(begin(i) + r);
        for (long c = 0; c < d_; c++) to[c * n + r] = to_float(from[c]);
      }
    }
  }

  // Sets the block of keys, of which 32 * steps are used. `ahead` is prefetched during the computation.
  void keys(const KeyBlock<T>& keys, int steps, KeyBlock<T>& ahead, const TwoScales& scales) {
    keys_ = &keys, ahead_ = &ahead, scales_ = scales;
    if (groups() == 1) return;  // score and add pack each tile on use
    for (int b = 0; b < steps; b++) {
      for (long c = 0; c < d_; c += 32) make_keys(b, c, k_ + (b * padded(d_) + c) * 32);
      for (long c = 0; c < dv_; c += 32) make_values(b, c, v_ + (c * kKeys / 32 + b * 32) * 32);
    }
  }

  // Computes x[r][kKeys] += the group's queries times 32 * steps keys.
  void score(int group, int steps, float* x) {
    of_rows(size(group), [&](auto n) {
      const float* q = q_ + begin(group) * d_;
      for (int b = 0; b < steps; b++, x += 32) {
        if (groups() > 1) {
          tile_products<n, 1, n>(q, k_ + b * padded(d_) * 32, int(d_), x, kKeys);
          continue;
        }
        if constexpr (n <= kFewRows)
          if (!two_scales_) {
            score_in_place<n>(keys_->k + b * 32, x, *ahead_);
            continue;
          }
        for (long c = 0; c < d_; c += 32)
          tile_products<n, 1, n>(q + c * n, make_keys(b, c, k_), int(std::min(32L, d_ - c)), x, kKeys);
      }
    });
  }
  // Computes acc[r][padded(dv)] += x[r] times the values of 32 * steps keys.
  void add(int group, int steps, const float* x, float* acc) {
    of_rows(size(group), [&](auto n) {
      for (long c = 0; groups() > 1 && c < dv_; c += 32)
        tile_products<n, kKeys, 1>(x, v_ + c * kKeys, steps * 32, acc + c, padded(dv_));
      for (int b = 0; groups() == 1 && b < steps; b++, x += 32) {
        if constexpr (n <= kFewRows) add_few<n>(x, keys_->v + b * 32, dv_, acc, padded(dv_), *ahead_);
        else
          for (long c = 0; c < dv_; c += 32)
            tile_products<n, kKeys, 1>(x, make_values(b, c, v_), 32, acc + c, padded(dv_));
      }
    });
  }

  // The same for 32 keys k, and for values v of 32 keys, and up to kFewRows rows, which need no tiles.
  static constexpr int kFewRows = 4;
  static FloatTiles without_tiles(float* queries, int rows, long d, long dv) {
    FloatTiles tiles(nullptr, rows, d, dv, false);
    tiles.q_ = queries;
    return tiles;
  }
  template <typename Ahead>
  void score_few_rows(const T* const* k, float* x, Ahead& ahead) {
    of_rows(rows_, [&](auto n) { if constexpr (n <= kFewRows) score_in_place<n>(k, x, ahead); });
  }
  template <typename Ahead>
  void add_few_rows(const T* const* v, const float* x, float* acc, Ahead& ahead) {
    of_rows(rows_, [&](auto n) { if constexpr (n <= kFewRows) add_few<n>(x, v, dv_, acc, padded(dv_), ahead); });
  }

 private:
  template <int ROWS, typename Ahead>
  void score_in_place(const T* const* k, float* x, Ahead& ahead) {
    if constexpr (kPairs)
      if (by_pairs()) return score_pairs<ROWS>((const bf16*)q_, k, d_, x, ahead);
    if constexpr (kBytes)
      if (by_bytes()) return score_bytes<ROWS>(bytes_, k, d_, x, ahead);
    score_few<ROWS, ONE_ORDER ? 1 : 2>(q_, k, d_, x, ahead);
  }
  // Products of bytes: queries of 16 bits keep their precision.
  static constexpr bool kBytes = kByteProducts && std::is_same_v<T, int8_t> && !std::is_same_v<Q, float> && !ONE_ORDER;
  bool by_bytes() const { return kBytes && rows_ <= kFewRows && !two_scales_ && d_ <= kMostBytes; }
  static constexpr bool kPairs = kPairProducts && std::is_same_v<T, bf16> && std::is_same_v<Q, bf16> && !ONE_ORDER;
  bool by_pairs() const { return kPairs && rows_ <= kFewRows && !two_scales_ && d_ % 32 == 0; }
  // Cache lines of K, and as many of V, to prefetch per tile. The 4 * d / 32 tiles of each cover all of 128 keys.
  static constexpr int kFetched = 8 * sizeof(T);
  const float* make_keys(int b, long c, float* tile) {
    ahead_->fetch(kFetched, int(d_ * sizeof(T)));
    pack_keys(keys_->k + b * 32, c, d_, tile);
    if (two_scales_) scale_tile(tile, c, d_, dv_, scales_.first + b * 32, scales_.second + b * 32);
    return tile;
  }
  const float* make_values(int b, long c, float* tile) {
    ahead_->fetch(kFetched, int(d_ * sizeof(T)));
    pack_values(keys_->v + b * 32, c, dv_, tile);
    return tile;
  }

  int rows_;
  long d_, dv_;
  bool two_scales_;
  TwoScales scales_;
  float *k_, *v_;  // [kKeys / 32][padded(d)][32], [padded(dv) / 32][kKeys][32]
  float* q_;
  QueryBytes bytes_;
  const KeyBlock<T>* keys_ = nullptr;
  KeyBlock<T>* ahead_ = nullptr;
};

}  // namespace
