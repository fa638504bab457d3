// Activations as integers of 16 bits with one scale per 256 k, finer than bf16 for all but the smallest entries, for
// products with quantized weights on vector units. AVX-512 multiplies bytes, so it takes them as two planes,
// x = 256 high + low; AVX2 takes pairs of words.
#pragma once

#include <algorithm>

#include "quant.h"
#include "vector_tiles.h"

class IntegerRows {
 public:
  static constexpr int kRun = 256;           // k that share a scale
  static constexpr float kTop = 32639;       // 127 * 256 + 127
  IntegerRows(void* memory, int rows, const Quant& q)
      : width_(long(q.k_steps) * 64), rows_(rows), span_(q.span()), zero_point_(q.zero_point()), values_((int32_t*)memory), scales_((float*)(values_ + rows * width_ / 2)),
        starts_((int32_t*)(scales_ + rows * runs())), sums_((float*)(starts_ + rows * spans())) {}
  static size_t bytes(long rows, const Quant& q) {
    const long width = long(q.k_steps) * 64;
    return rows * (width * 2 + ((width + kRun - 1) / kRun + 2 * ((width + q.span() - 1) / q.span())) * 4);
  }

  int groups() const { return (rows_ + kMostRows - 1) / kMostRows; }
  int begin(int group) const { return int(long(rows_) * group / groups()); }
  int size(int group) const { return begin(group + 1) - begin(group); }
  long width() const { return width_; }
  // Two dwords for each 4 k of each row of a group, from k on
  const int32_t* values(int group, long k) const { return values_ + begin(group) * (width_ / 2) + k / 4 * size(group) * 2; }
  const float* scales(int group, long k) const { return scales_ + k / kRun * rows_ + begin(group); }
  // What cancels the zero point that the codes contain: the sum of the integers of a span of k, times it
  const int32_t* starts(int group, long k) const { return starts_ + k / span_ * rows_ + begin(group); }
  // The sum of the integers of a span of k
  const float* sums(int group, long k) const { return sums_ + k / span_ * rows_ + begin(group); }
  long ld() const { return rows_; }  // from one run or span to the next, of `scales`, `starts` and `sums`

  // row(r) points to the start of a row of `given` elements; the rest is filled with zeros.
  template <typename F>
  void fill(long given, F&& row) const {
    for (int group = 0; group < groups(); group++)
      for (int r = 0; r < size(group); r++) fill_row(group, r, row(begin(group) + r), given);
  }

  // The integer of x.
  int value(long r, long k) const {
    int group = 0;
    while (begin(group + 1) <= r) group++;
    const int32_t* at = values(group, k) + (r - begin(group)) * 2;
#if defined(__AVX512F__)
    return 256 * ((const int8_t*)at)[k % 4] + ((const int8_t*)at)[4 + k % 4];
#else
    return ((const int16_t*)at)[k % 4 / 2 + k % 2 * 2];
#endif
  }
  // The high byte of the integer of x, which is 256 times that, rounded.
  int high_byte(long r, long k) const { return (value(r, k) + 128) >> 8; }
  float scale(long r, long k) const { return scales_[k / kRun * rows_ + r]; }

 private:
  long runs() const { return (width_ + kRun - 1) / kRun; }
  long spans() const { return (width_ + span_ - 1) / span_; }

  void fill_row(int group, int r, const bf16* x, long given) const {
    const int row = begin(group) + r;
    for (long begin = 0; begin < width_; begin += kRun) {
      const long end = std::min(begin + kRun, width_), real = std::clamp(given, begin, end);
      bf16 padded[kRun];
      const bf16* from = x + begin;
      if (real < end) {
        std::fill(std::copy(x + begin, x + real, padded), padded + (end - begin), bf16{0});
        from = padded;
      }
      vf tops = zero();
      for (long k = 0; k < end - begin; k += 16) tops = max(tops, max(load(from + k), zero() - load(from + k)));
      const float top = reduce_max(tops);
      const vf inverse = set1(top > 1e-30f ? kTop / top : 0.f);
      scales_[begin / kRun * rows_ + row] = top / kTop;
      int total = 0;
      for (long k = begin; k < end; k += 16) {
        total += put(group, r, k, nearest(load(from + (k - begin)) * inverse));
        if ((k + 16) % span_ == 0 || k + 16 == end) {
          starts_[k / span_ * rows_ + row] = -zero_point_ * total, sums_[k / span_ * rows_ + row] = float(total);
          total = 0;
        }
      }
    }
  }

  // Writes sixteen integers of row r of a group; returns their sum.
  int put(int group, int r, long k, vf integers) const {
    int32_t* to = values_ + begin(group) * (width_ / 2) + (k / 4 * size(group) + r) * 2;
    __m128i pairs[4];
#if defined(__AVX512F__)
    const __m512i n = _mm512_cvtps_epi32(integers.v);
    const __m128i low = _mm512_cvtepi32_epi8(n), high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8));
    pairs[0] = _mm_unpacklo_epi32(high, low), pairs[2] = _mm_unpackhi_epi32(high, low);
    const int sum = int(reduce_add(integers));
#else
    const __m256i a = _mm256_cvtps_epi32(integers.a), b = _mm256_cvtps_epi32(integers.b), n = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m256i ordered = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(n, 0xd8), 0xd8);
    pairs[0] = _mm256_castsi256_si128(ordered), pairs[2] = _mm256_extracti128_si256(ordered, 1);
    const int sum = int(reduce_add(integers));
#endif
    pairs[1] = _mm_unpackhi_epi64(pairs[0], pairs[0]), pairs[3] = _mm_unpackhi_epi64(pairs[2], pairs[2]);
    for (int i = 0; i < 4; i++) _mm_storel_epi64((__m128i*)(to + i * size(group) * 2), pairs[i]);
    return sum;
  }

  long width_;
  int rows_, span_, zero_point_;
  int32_t* values_;
  float* scales_;
  int32_t* starts_;
  float* sums_;
};

