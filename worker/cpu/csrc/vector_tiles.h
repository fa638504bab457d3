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

// sums[r * ld + column] += sum over k of x[k][r] w[k][column], for ROWS rows, `steps` k-steps and WIDTH registers of
// columns, in the order of k. (`vdpbf16ps`, which takes pairs of k as stored, is slower: 0.73 x for 8 rows, 0.6 for
// many.)
template <int ROWS, int WIDTH>
void vector_tiles(const float* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  const Ints upper = set1_ints(int(0xffff0000u));
  Floats acc[ROWS * WIDTH];
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { acc[i] = load_floats(sums + i / WIDTH * ld + i % WIDTH * kLanes); });
  for (int s = 0; s < steps; s++, w += kTileStep) {
    fetch.step();
#pragma GCC unroll 2
    for (int p = 0; p < 16; p++, x += 2 * ROWS)
      unrolled<2>([&](auto odd) __attribute__((always_inline)) {
        Floats v[WIDTH];
        unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) {
          const Ints pairs = load_ints(w + p * 32 + tile_place(i * kLanes));
          v[i] = odd ? Floats(pairs & upper) : evens(pairs);
        });
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          const Floats one = set1_floats(x[odd * ROWS + r]);
          unrolled<WIDTH>(
              [&](auto i) __attribute__((always_inline)) { acc[r * WIDTH + i] = fma(v[i], one, acc[r * WIDTH + i]); });
        });
      });
  }
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { store_floats(sums + i / WIDTH * ld + i % WIDTH * kLanes, acc[i]); });
}

// The same for x[k / 2][r] in pairs of bf16, which are multiplied as they are stored.
template <int ROWS, int WIDTH>
void vector_tiles(const int32_t* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  Floats acc[ROWS * WIDTH];
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { acc[i] = load_floats(sums + i / WIDTH * ld + i % WIDTH * kLanes); });
  for (int s = 0; s < steps; s++, w += kTileStep) {
    fetch.step();
#pragma GCC unroll 2
    for (int p = 0; p < 16; p++, x += ROWS) {
      Ints pairs[WIDTH];
      unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) {
        pairs[i] = load_ints(w + p * 32 + tile_place(i * kLanes));
      });
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        const Ints one = set1_ints(x[r]);
        unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) {
          acc[r * WIDTH + i] = add_pair_products(acc[r * WIDTH + i], pairs[i], one);
        });
      });
    }
  }
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { store_floats(sums + i / WIDTH * ld + i % WIDTH * kLanes, acc[i]); });
}

// Like vector_tiles, for 32 columns and `rows` rows, at most kMostRows: a group of `FloatGroups` or `PairGroups`.
template <typename X>
inline void vector_group(int rows, const X* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  of_rows(rows, [&](auto n) {
    if constexpr (n <= kRowsOfAll) vector_tiles<n, 32 / kLanes>(x, w, steps, fetch, sums, ld);
    else
      for (int c = 0; c < 32; c += 2 * kLanes) vector_tiles<n, 2>(x, w + tile_place(c), steps, fetch, sums + c, ld);
  });
}

// Rows in groups of at most kMostRows, each group ordered by k, so that values are contiguous in the order of use: of
// floats, or of pairs of bf16 (PAIRS). memory: floats(k, rows) floats.
template <bool PAIRS>
class GroupsOf {
 public:
  using Value = std::conditional_t<PAIRS, int32_t, float>;
  static constexpr int kEach = PAIRS ? 2 : 1;  // k of a value
  // fill() stores kLanes values at a time
  static long floats(long k, long rows) { return rows * k / kEach + kLanes; }
  GroupsOf(float* memory, long k, int rows)
      : memory_((Value*)memory), k_(k), rows_(rows), count_((rows + kMostRows - 1) / kMostRows) {}

  // row(r) points to the start of a row of `given` elements; the rest is filled with zeros.
  template <typename F>
  void fill(long given, F&& row) const {
    for (int i = 0; i < count_; i++) {
      const int rows = size(i);
      const bf16* from[kLanes];
      for (int r = 0; r < kLanes; r++) from[r] = row(begin(i) + std::min(r, rows - 1));
      Value* to = memory_ + begin(i) * k_ / kEach;
      long k = 0;
      for (; k + kLanes * kEach <= given; k += kLanes * kEach) {
        Ints v[kLanes];
        for (int r = 0; r < (rows > 1 ? kLanes : 1); r++)
          v[r] = PAIRS ? load_ints(from[r] + k) : left<16>(widen_words(from[r] + k));
        if (rows > 1) transpose(v);
        // Order matters: the next store overwrites what this one writes beyond these rows
        for (int j = 0; j < (rows > 1 ? kLanes : 1); j++) store_ints(to + (k / kEach + j) * rows, v[j]);
      }
      for (; k < given; k += kEach)
        for (int r = 0; r < rows; r++) {
          const uint32_t low = from[r][k].bits, high = PAIRS && k + 1 < given ? from[r][k + 1].bits : 0;
          to[k / kEach * rows + r] = PAIRS ? Value(low | high << 16) : Value(to_float(from[r][k]));
        }
      std::fill(to + k / kEach * rows, to + k_ / kEach * rows, Value());
    }
  }
  int count() const { return count_; }
  int begin(int i) const { return int(long(rows_) * i / count_); }
  int size(int i) const { return begin(i + 1) - begin(i); }
  const Value* at(int i, long k) const { return memory_ + (begin(i) * k_ + k * size(i)) / kEach; }

 private:
  Value* memory_;
  long k_;  // even
  int rows_, count_;
};
using FloatGroups = GroupsOf<false>;
using Groups = GroupsOf<kPairDots>;  // of products with bf16 weights

}  // namespace
