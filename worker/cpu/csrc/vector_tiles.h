// What products by AVX2 are made of: a few rows of floats times tiles of bf16.
//
// A tile is 16 pairs of k by 16 columns, [16][16][2], two of them side by side a k-step (gemm.cpp): bf16 becomes float by a shift or a mask, even k and odd k apart.
#pragma once

#include <utility>

#include "simd.h"

#if !defined(__AVX512F__)

namespace {

constexpr int kTileStep = 1024;  // elements from a k-step to the next
constexpr int kMostRows = 6;     // sixteen registers hold the sums of these and 16 columns beside what they are made of,
constexpr int kRowsOfPair = 2;   // or of these and 32 columns

// bf16 to float, two at a time.
inline __m256i load_pairs(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256 evens(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odds(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u)))); }

// Eight rows of eight dwords to eight columns.
inline void transpose_8x8(__m256i* r) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]), r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
  for (int i = 0; i < 4; i++) t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20), t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  std::copy(t, t + 8, r);
}

// f(0) .. f(N - 1), written out: an array that is indexed so stays in registers.
template <typename F, int... I>
__attribute__((always_inline)) inline void unrolled(F&& f, std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>()), ...); }
template <int N, typename F>
__attribute__((always_inline)) inline void unrolled(F&& f) { unrolled(f, std::make_integer_sequence<int, N>()); }

// What is fetched from memory on the side: `lines` cache lines with each k-step.
struct Fetch {
  const char* at = nullptr;
  int lines = 0;
  void step() {
    for (int i = 0; i < lines; i++, at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// sums[r * ld + column] += the sum over k of x[r * ROW + k * K] w[k][column], for ROWS rows, `steps` k-steps and TILES tiles, k after k.
template <int ROWS, int TILES, int ROW, int K>
void vector_tiles(const float* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  constexpr int WIDTH = 2 * TILES;  // registers of a row
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
  __m256 acc[ROWS * WIDTH];
  unrolled<ROWS * WIDTH>([&](auto i) { acc[i] = _mm256_loadu_ps(sums + i / WIDTH * ld + i % WIDTH * 8); });
  for (int s = 0; s < steps; s++, w += kTileStep) {
    fetch.step();
#pragma GCC unroll 2
    for (int p = 0; p < 16; p++, x += 2 * K)
      unrolled<2>([&](auto odd) __attribute__((always_inline)) {
        __m256 v[WIDTH];
        unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) {
          const __m256i pairs = _mm256_loadu_si256((const __m256i*)(w + i / 2 * (kTileStep / 2) + p * 32 + i % 2 * 16));
          v[i] = _mm256_castsi256_ps(odd ? _mm256_and_si256(pairs, upper) : _mm256_slli_epi32(pairs, 16));
        });
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          const __m256 one = _mm256_broadcast_ss(x + odd * K + r * ROW);
          unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) { acc[r * WIDTH + i] = _mm256_fmadd_ps(v[i], one, acc[r * WIDTH + i]); });
        });
      });
  }
  unrolled<ROWS * WIDTH>([&](auto i) { _mm256_storeu_ps(sums + i / WIDTH * ld + i % WIDTH * 8, acc[i]); });
}

// The same for 32 columns. ROW = 0: x is a group of `Groups`.
template <int ROWS, int ROW>
void vector_rows(const float* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  constexpr int R = ROW ? ROW : 1, K = ROW ? 1 : ROWS;
  if constexpr (ROWS <= kRowsOfPair) vector_tiles<ROWS, 2, R, K>(x, w, steps, fetch, sums, ld);
  else for (int t = 0; t < 2; t++) vector_tiles<ROWS, 1, R, K>(x, w + t * (kTileStep / 2), steps, fetch, sums + t * 16, ld);
}

// The same for `rows` rows, at most kMostRows.
template <int ROW = 0>
inline void vector_group(int rows, const float* x, const bf16* w, int steps, Fetch& fetch, float* sums, long ld) {
  static constexpr void (*kWays[])(const float*, const bf16*, int, Fetch&, float*, long) = {vector_rows<1, ROW>, vector_rows<2, ROW>, vector_rows<3, ROW>,
                                                                                           vector_rows<4, ROW>, vector_rows<5, ROW>, vector_rows<6, ROW>};
  kWays[rows - 1](x, w, steps, fetch, sums, ld);
}

// Rows in groups of at most kMostRows, as floats, each group k by k: what is multiplied in turn lies in a row. memory: floats(k, rows).
class Groups {
 public:
  static long floats(long k, long rows) { return rows * k + 8; }  // eight are stored at a time
  Groups(float* memory, long k, int rows) : memory_(memory), k_(k), rows_(rows), count_((rows + kMostRows - 1) / kMostRows) {}

  // row(r) is a row's start; it has `given` elements, and zeros from there on.
  template <typename F>
  void fill(long given, F&& row) const {
    for (int i = 0; i < count_; i++) {
      const int rows = size(i);
      const bf16* from[8];
      for (int r = 0; r < 8; r++) from[r] = row(begin(i) + std::min(r, rows - 1));
      float* to = memory_ + begin(i) * k_;
      long k = 0;
      for (; k + 8 <= given; k += 8) {
        __m256i v[8];
        for (int r = 0; r < 8; r++) v[r] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from[r] + k))), 16);
        if (rows > 1) transpose_8x8(v);
        for (int j = 0; j < (rows > 1 ? 8 : 1); j++) _mm256_storeu_si256((__m256i*)(to + (k + j) * rows), v[j]);  // in order: what is there beyond these rows is in the next one's place
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

#endif
