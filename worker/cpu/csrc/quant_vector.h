// Products of integer rows (quant_rows.h) with quantized weights on vector units. Sums of a span of k are exact; then
// the scales are applied.
#pragma once

#include "quant_rows.h"

namespace {

// Four k of kLanes columns, and sums of their products with rows.
#if defined(__AVX512F__)
struct Codes { Ints bytes; };
struct Sum { Ints high, low; };
inline Codes codes_in(Ints bytes) { return {bytes}; }
inline Sum sum_from(int start) { return {Ints{}, set1_ints(start)}; }
inline void add(Sum& sum, Codes w, const int32_t* x) {
  sum.high = add_byte_products(sum.high, w.bytes, set1_ints(x[0])), sum.low = add_byte_products(sum.low, w.bytes, set1_ints(x[1]));
}
inline Ints total(Sum sum) { return add_ints(left<8>(sum.high), sum.low); }
#else
struct Codes { Ints even, odd; };
struct Sum { Ints words; };
inline Codes codes_in(Ints bytes) { return {bytes & set1_words(255), words_right<8>(bytes)}; }
inline Sum sum_from(int start) { return {set1_ints(start)}; }
inline void add(Sum& sum, Codes w, const int32_t* x) { sum.words = add_products(add_products(sum.words, w.even, set1_ints(x[0])), w.odd, set1_ints(x[1])); }
inline Ints total(Sum sum) { return sum.words; }
#endif

// Whether so many rows prefetch the weight as they use it.
constexpr bool streams(int rows) { return kLanes == 16 && rows <= 4; }

// sums[r] += 16 k of kLanes columns times rows r < ROWS. at, half: as for codes_of.
template <int KIND, int ROWS>
__attribute__((always_inline)) inline void add_codes(const uint8_t* at, int half, const int32_t* x, Sum* sums) {
  codes_of<KIND>(at, half, [&](int i, Ints bytes) __attribute__((always_inline)) {
    const Codes w = codes_in(bytes);
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { add(sums[r], w, x + (i * ROWS + r) * 2); });
  });
}

// The scales and offsets of `columns` columns in the spans of a run of k, [span][32].
struct RunNumbers {
  alignas(64) float scales[IntegerRows::kRun / 16][kCols], offsets[IntegerRows::kRun / 16][kCols];
};

inline Floats floats_of(const Quant& q, const void* table, long at) {
#if defined(__AVX512F__)
  return q.sixteen(table, at).v;
#else
  return q.half ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const f16*)table + at))) : load8((const bf16*)table + at);
#endif
}

template <int KIND>
__attribute__((noinline)) void find_numbers(const Quant& q, int nb, long begin, long end, int column, int columns, RunNumbers& to) {
  for (int c = column; c < column + columns; c += kLanes) {
    if constexpr (is_super_kind(KIND)) {
      using Scales = SuperScales<KIND>;
      const Scales scales(q.super(nb, int(begin / 256)), c);
      unrolled<256 / Scales::kGroup>([&](auto i) {
        store_floats(to.scales[i] + c, scales.template scale<i>());
        if constexpr (kKinds[KIND].offsets) store_floats(to.offsets[i] + c, scales.template offset<i>());
      });
    } else {
      const int span = q.span();
      for (long k = begin, i = 0; k < end; k += span, i++) {
        const long place = q.group_at(nb, int(k)) + c;
        store_floats(to.scales[i] + c, KIND == kFloats4 ? half_power((const uint8_t*)q.scales + place) : floats_of(q, q.scales, place));
        if (kKinds[KIND].offsets || (KIND <= kIntegers8 && q.offsets)) store_floats(to.offsets[i] + c, floats_of(q, q.offsets, place));
      }
    }
  }
}

// y[ROWS][32] += group `group` of x, k0 .. k1 - 1 (whole runs) times block nb. `fetch` is advanced once per 32 k and
// register of columns.
template <int KIND, int ROWS>
void quant_part(const Quant& q, const IntegerRows& x, int group, int nb, long k0, long k1, Fetch& fetch, float* y) {
  // Registers of columns together: more independent sums, to hide latency
  constexpr int PARTS = ROWS <= 2 ? 2 : 1;
  const bool has_offsets = kKinds[KIND].offsets || (KIND <= kIntegers8 && q.offsets);
  const int span = q.span();
  const long ld = x.ld();
  RunNumbers numbers;
  for (int column = 0; column < kCols; column += PARTS * kLanes)
    for (long begin = k0; begin < k1; begin += IntegerRows::kRun) {
      const long end = std::min(begin + IntegerRows::kRun, k1);
      find_numbers<KIND>(q, nb, begin, end, column, PARTS * kLanes, numbers);
      const int32_t *values = x.values(group, begin), *starts = x.starts(group, begin);
      const float* row_sums = x.sums(group, begin);
      const uint8_t* codes[PARTS];
      unrolled<PARTS>([&](auto p) { codes[p] = codes_at(q, nb, int(begin), column + p * kLanes); });
      Floats totals[PARTS][ROWS] = {};
      Sum sums[PARTS][ROWS];
      int i = 0;  // index of the span
      auto start = [&] __attribute__((always_inline)) {
        unrolled<PARTS * ROWS>([&](auto n) __attribute__((always_inline)) { sums[n / ROWS][n % ROWS] = sum_from(quant_zero_point(KIND) ? starts[n % ROWS] : 0); });
        starts += ld;
      };
      auto add_half = [&](auto half) __attribute__((always_inline)) {
        unrolled<PARTS>([&](auto p) __attribute__((always_inline)) { add_codes<KIND, ROWS>(codes[p], half, values, sums[p]); });
        values += 4 * 2 * ROWS;
      };
      auto apply = [&] __attribute__((always_inline)) {
        unrolled<PARTS>([&](auto p) __attribute__((always_inline)) {
          const Floats scale = load_floats(numbers.scales[i] + column + p * kLanes);
          unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { totals[p][r] = fma(to_floats(total(sums[p][r])), scale, totals[p][r]); });
          if (has_offsets) {
            const Floats offset = load_floats(numbers.offsets[i] + column + p * kLanes);
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { totals[p][r] = fma(offset, set1_floats(row_sums[r]), totals[p][r]); });
          }
        });
        row_sums += ld, i++;
      };
      auto prefetch = [&] __attribute__((always_inline)) {
        if (!streams(ROWS)) return fetch.step();
        unrolled<PARTS>([&](auto p) __attribute__((always_inline)) {
          for (int line = 0; line < quant_bits(KIND); line++) read_ahead(codes[p] + line * 64);
        });
      };
      for (long k = begin, stop; k < end; k = stop) {
        stop = std::min<long>(k + std::max(span, 32), end);
        start();
        for (long at = k; at < stop; at += 32) {
          prefetch();
          add_half(std::integral_constant<int, 0>());
          if (kKinds[KIND].group == 16) apply(), start();
          add_half(std::integral_constant<int, 1>());
          // From the second half of a step of a tile to the next step
          unrolled<PARTS>([&](auto p) { codes[p] += at % 64 ? quant_bits(KIND) * 192 : quant_bits(KIND) * 64; });
        }
        apply();
      }
      const float* row_scales = x.scales(group, begin);
      unrolled<PARTS * ROWS>([&](auto n) __attribute__((always_inline)) {
        float* to = y + n % ROWS * kCols + column + n / ROWS * kLanes;
        store_floats(to, fma(totals[n / ROWS][n % ROWS], set1_floats(row_scales[n % ROWS]), load_floats(to)));
      });
    }
}

// k of a block whose codes stay in L1 while all rows use them
constexpr int kQuantPart = 512;

// y[rows of x][32] = x times block nb.
template <int KIND>
void quant_block(const Quant& q, const IntegerRows& x, int nb, float* y) {
  const int rows = int(x.ld());
  const bool stream = streams(rows);
  const long part = stream ? x.width() : kQuantPart;
  constexpr long kAhead = 8 << 10;
  std::fill(y, y + rows * kCols, 0.f);
  for (long k = 0; k < x.width(); k += part) {
    const int passes = kCols / kLanes * x.groups();
    Fetch fetch{(const char*)q.step(nb, int(k / 64)) + kAhead, stream ? 0 : (2 * q.bits() + passes - 1) / passes};
    for (int i = 0; i < x.groups(); i++)
      of_rows(x.size(i), [&](auto n) { quant_part<KIND, n>(q, x, i, nb, k, std::min(k + part, x.width()), fetch, y + x.begin(i) * kCols); });
  }
}

}  // namespace
