// Building blocks of products on vector units: a few rows of floats times tiles of bf16.
//
// A tile is 16 pairs of k by 16 columns, [16][16][2]; two tiles, one after the other, form a k-step (gemm.cpp). bf16 is
// converted to float by a shift or a mask, separately for even k and odd k.
#pragma once

#include "simd.h"

namespace {

constexpr int kTileStep = 1024;                        // elements from one k-step to the next
// Maximum rows of a group: their sums for two registers of columns, and the operands, fit 32 or 16 registers.
constexpr int kMostRows = kLanes == 16 ? 12 : 6;
constexpr int kRowsOfAll = kLanes == 16 ? 12 : 2;      // the same for all 32 columns
constexpr int kPasses = 32 / (2 * kLanes);             // passes over a k-step, two registers of columns each
constexpr int kParts = 16 / kLanes, kVectors = 2 / kParts;  // registers per 16 columns; groups of 16 columns per pass

// Returns the offset of a column's pairs in a tile row, in elements.
constexpr long tile_place(long column) { return column / 16 * (kTileStep / 2) + column % 16 * 2; }

// Calls f(n) with the number of rows, 1 .. kMostRows, as a compile-time constant.
template <typename F, int... I>
inline void of_rows(int rows, F&& f, std::integer_sequence<int, I...>) {
  using Way = void (*)(F&);
  static constexpr Way kWays[] = {[](F& f) { f(std::integral_constant<int, I + 1>()); }...};
  kWays[rows - 1](f);
}
template <typename F>
inline void of_rows(int rows, F&& f) { of_rows(rows, f, std::make_integer_sequence<int, kMostRows>()); }

// Prefetches a stream: `lines` cache lines per k-step into L2, and from there into L1 the lines 7 KiB before those.
struct Fetch {
  const char* at = nullptr;
  int lines = 0;
  void step() {
    for (int i = 0; i < lines; i++, at += 64) prefetch_l2(at), prefetch_l1(at - (7 << 10));
  }
};

// sums[r * ld + column] += sum over k of x[r * ROW + k * K] w[k][column], for ROWS rows, `steps` k-steps and WIDTH
// registers of columns, in the order of k. (`vdpbf16ps`, which takes pairs of k as stored, is slower: 0.73 x for 8
// rows, 0.6 for many.)
template <int ROWS, int WIDTH, int ROW, int K>
void vector_tiles(const float* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  const Ints upper = set1_ints(int(0xffff0000u));
  Floats acc[ROWS * WIDTH];
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { acc[i] = load_floats(sums + i / WIDTH * ld + i % WIDTH * kLanes); });
  for (int s = 0; s < steps; s++, w += kTileStep) {
    fetch.step();
#pragma GCC unroll 2
    for (int p = 0; p < 16; p++, x += 2 * K)
      unrolled<2>([&](auto odd) __attribute__((always_inline)) {
        Floats v[WIDTH];
        unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) {
          const Ints pairs = load_ints(w + p * 32 + tile_place(i * kLanes));
          v[i] = odd ? Floats(pairs & upper) : evens(pairs);
        });
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          const Floats one = set1_floats(x[odd * K + r * ROW]);
          unrolled<WIDTH>(
              [&](auto i) __attribute__((always_inline)) { acc[r * WIDTH + i] = fma(v[i], one, acc[r * WIDTH + i]); });
        });
      });
  }
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { store_floats(sums + i / WIDTH * ld + i % WIDTH * kLanes, acc[i]); });
}

// Like vector_tiles, for 32 columns and `rows` rows, at most kMostRows. ROW = 0: x is a group of `Groups`.
template <int ROW = 0>
inline void vector_group(int rows, const float* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  of_rows(rows, [&](auto n) {
    constexpr int R = ROW ? ROW : 1, K = ROW ? 1 : n;
    if constexpr (n <= kRowsOfAll) vector_tiles<n, 32 / kLanes, R, K>(x, w, steps, fetch, sums, ld);
    else
      for (int c = 0; c < 32; c += 2 * kLanes)
        vector_tiles<n, 2, R, K>(x, w + tile_place(c), steps, fetch, sums + c, ld);
  });
}

// Rows as floats in groups of at most kMostRows, each group ordered by k, so that values are contiguous in the order of
// use. memory: floats(k, rows) floats.
class Groups {
 public:
  static long floats(long k, long rows) { return rows * k + kLanes; }  // fill() stores kLanes floats at a time
  Groups(float* memory, long k, int rows)
      : memory_(memory), k_(k), rows_(rows), count_((rows + kMostRows - 1) / kMostRows) {}

  // row(r) points to the start of a row of `given` elements; the rest is filled with zeros.
  template <typename F>
  void fill(long given, F&& row) const {
    for (int i = 0; i < count_; i++) {
      const int rows = size(i);
      const bf16* from[kLanes];
      for (int r = 0; r < kLanes; r++) from[r] = row(begin(i) + std::min(r, rows - 1));
      float* to = memory_ + begin(i) * k_;
      long k = 0;
      for (; k + kLanes <= given; k += kLanes) {
        Ints v[kLanes];
        for (int r = 0; r < (rows > 1 ? kLanes : 1); r++) v[r] = left<16>(widen_words(from[r] + k));
        if (rows > 1) transpose(v);
        // Order matters: the next store overwrites what this one writes beyond these rows
        for (int j = 0; j < (rows > 1 ? kLanes : 1); j++) store_ints(to + (k + j) * rows, v[j]);
      }
      for (; k < given; k++) for (int r = 0; r < rows; r++) to[k * rows + r] = to_float(from[r][k]);
      std::fill(to + given * rows, to + k_ * rows, 0.f);
    }
  }
  int count() const { return count_; }
  int begin(int i) const { return int(long(rows_) * i / count_); }
  int size(int i) const { return begin(i + 1) - begin(i); }
  const float* at(int i, long k) const { return memory_ + begin(i) * k_ + k * size(i); }

 private:
  float* memory_;
  long k_;
  int rows_, count_;
};

}  // namespace
