// Activations as integers, for products with quantized weights on vector units.
//
// In 16 bits, with one scale per 256 k, they are finer than bf16 for all but the smallest entries. AVX-512 and Arm's
// dotprod multiply bytes, so they take them as two planes, x = 256 high + low; AVX2 and NEON take pairs of words.
//
// In 8 bits (Quant::narrow) they are one plane of bytes, or, of AVX2 and NEON for codes above 63, pairs of words, whose
// products with bytes would overflow. They have a scale per group of the weight, of 256 k at most, or per 256 k for
// kQ4_K and so on: the same as in llama.cpp for the blocks of GGUF files.
#pragma once

#include <algorithm>

#include "quant.h"
#include "vector_tiles.h"

class IntegerRows {
 public:
  static constexpr int kRun = 256;  // k that a kernel multiplies at a time
  // Whether rows of so many dwords for 4 k are multiplied by two registers of columns: many rows in bytes, with AVX-512
  static constexpr bool by_two(int dwords, int rows) { return kLanes == 16 && dwords == 1 && rows > kMostRows; }
  // Maximum rows of a group: their sums and totals, and the operands, fit 32 registers
  static constexpr int group_rows(int dwords, int rows) { return by_two(dwords, rows) ? kMostRows / 2 : kMostRows; }
  IntegerRows(void* memory, int rows, const Quant& q)
        : width_(long(q.k_steps) * 64), rows_(rows), span_(q.span()), per_(per(q)),
          zero_point_(q.zero_point() - byte_offset(q.kind)), dwords_(dwords(q)),
          top_(q.narrow ? 127 : 127 * 256 + 127), scaled_sums_(by_span(q.kind, q.narrow)),
          groups_((rows + group_rows(dwords_, rows) - 1) / group_rows(dwords_, rows)),
          least_(rows / std::max(groups_, 1)), larger_(rows % std::max(groups_, 1)), span_bits_(__builtin_ctz(span_)),
          per_bits_(__builtin_ctz(per_)), values_((int32_t*)memory),
          scales_((float*)(values_ + rows * width_ / 4 * dwords_)), starts_((int32_t*)(scales_ + rows * runs())),
          sums_((float*)(starts_ + rows * spans())) {}
  static size_t bytes(long rows, const Quant& q) {
    const long width = long(q.k_steps) * 64;
    return rows * (width * dwords(q) + ((width + per(q) - 1) / per(q) + 2 * ((width + q.span() - 1) / q.span())) * 4);
  }
  // Whether each span of k has a scale of its own, not each run.
  static constexpr bool by_span(int kind, bool narrow) { return narrow && !is_super_kind(kind); }
  // The number of dwords for 4 k.
  static constexpr int dwords(int kind, bool narrow) {
    return narrow && (QUIRE_BYTE_PRODUCTS || top_code(kind) < 64) ? 1 : 2;
  }
  static int dwords(const Quant& q) { return dwords(q.kind, q.narrow); }

  int groups() const { return groups_; }
  int begin(int group) const { return group * least_ + std::min(group, larger_); }
  int size(int group) const { return least_ + (group < larger_); }
  long width() const { return width_; }
  // The dwords for each 4 k of each row of a group, from k on
  const int32_t* values(int group, long k) const {
    return values_ + (begin(group) * (width_ / 4) + k / 4 * size(group)) * dwords_;
  }
  const float* scales(int group, long k) const { return scales_ + (k >> per_bits_) * rows_ + begin(group); }
  // What cancels the zero point that the codes contain: the sum of the integers of a span of k, times it
  const int32_t* starts(int group, long k) const { return starts_ + (k >> span_bits_) * rows_ + begin(group); }
  // The sum of the integers of a span of k; by_span: times their scale
  const float* sums(int group, long k) const { return sums_ + (k >> span_bits_) * rows_ + begin(group); }
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
    const int32_t* at = values(group, k) + (r - begin(group)) * dwords_;
    if (dwords_ == 1) return ((const int8_t*)at)[k % 4];
#if QUIRE_BYTE_PRODUCTS
    return 256 * ((const int8_t*)at)[k % 4] + ((const int8_t*)at)[4 + k % 4];
#else
    return ((const int16_t*)at)[k % 4 / 2 + k % 2 * 2];
#endif
  }
  // The high byte of the integer of x, which is 256 times that, rounded.
  int high_byte(long r, long k) const { return (value(r, k) + 128) >> 8; }
  float scale(long r, long k) const { return scales_[k / per_ * rows_ + r]; }

 private:
  static int per(const Quant& q) { return by_span(q.kind, q.narrow) ? q.span() : kRun; }
  long runs() const { return (width_ + per_ - 1) / per_; }
  long spans() const { return (width_ + span_ - 1) / span_; }

  void fill_row(int group, int r, const bf16* x, long given) const {
    const int row = begin(group) + r;
    for (long begin = 0; begin < width_; begin += per_) {
      const long end = std::min(begin + per_, width_), real = std::clamp(given, begin, end);
      bf16 padded[kRun];
      const bf16* from = x + begin;
      if (real < end) {
        std::fill(std::copy(x + begin, x + real, padded), padded + (end - begin), bf16{0});
        from = padded;
      }
      vf tops = zero();
      for (long k = 0; k < end - begin; k += 16) tops = max(tops, max(load(from + k), zero() - load(from + k)));
      const float top = reduce_max(tops), scale = top / top_;
      const vf inverse = set1(top > 1e-30f ? top_ / top : 0.f);
      scales_[begin / per_ * rows_ + row] = scale;
      vf sum = zero();
      for (long k = begin; k < end; k += 16) {
        const vf integers = nearest(load(from + (k - begin)) * inverse);
        put(group, r, k, integers);
        sum = sum + integers;
        if ((k + 16) % span_ == 0 || k + 16 == end) {
          const float total = reduce_add(sum);
          starts_[k / span_ * rows_ + row] = -zero_point_ * int(total),
                                      sums_[k / span_ * rows_ + row] = scaled_sums_ ? total * scale : total;
          sum = zero();
        }
      }
    }
  }

  // Writes sixteen integers of row r of a group.
  void put(int group, int r, long k, vf integers) const {
    int32_t* to = values_ + (begin(group) * (width_ / 4) + k / 4 * size(group) + r) * dwords_;
    if (dwords_ == 1) {
      alignas(16) int32_t bytes[4];
      store_bytes((int8_t*)bytes, integers);
      for (int i = 0; i < 4; i++) to[i * size(group)] = bytes[i];
      return;
    }
    alignas(32) int32_t pairs[8];
    store_two_dwords(pairs, integers);
    for (int i = 0; i < 4; i++) memcpy(to + i * size(group) * 2, pairs + i * 2, 8);
  }

  long width_;
  int rows_, span_, per_, zero_point_, dwords_;
  float top_;
  bool scaled_sums_;
  int groups_, least_, larger_;  // groups, of which the first larger_ have least_ + 1 rows, the others least_
  int span_bits_, per_bits_;     // logarithms of span_ and per_
  int32_t* values_;
  float* scales_;
  int32_t* starts_;
  float* sums_;
};

