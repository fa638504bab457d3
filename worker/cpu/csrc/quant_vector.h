// Products of integer rows (quant_rows.h) with quantized weights on vector units. Sums of a span of k are exact; then
// the scales are applied.
#pragma once

#include "gemm_vector.h"
#include "quant_rows.h"

namespace {

// Sums of products of rows with four k of kLanes columns. DWORDS, NARROW: as in IntegerRows.
template <int DWORDS, bool NARROW> struct Sum;
#if QUIRE_BYTE_PRODUCTS
template <bool NARROW> struct Sum<2, NARROW> {
  Ints high, low;
  static Sum from(int start) { return {Ints{}, set1_ints(start)}; }
  template <int I, int N> void add(Ints codes, const Operands<N>& x) {
    high = add_byte_products<I * 2>(high, codes, x), low = add_byte_products<I * 2 + 1>(low, codes, x);
  }
  Ints total() const { return add_ints(left<8>(high), low); }
};
template <> struct Sum<1, true> {
  Ints sum;
  static Sum from(int start) { return {set1_ints(start)}; }
  template <int I, int N> void add(Ints codes, const Operands<N>& x) { sum = add_byte_products<I>(sum, codes, x); }
  Ints total() const { return sum; }
};
#else
template <bool NARROW> struct Sum<2, NARROW> {
  Ints sum;
  static Sum from(int start) { return {set1_ints(start)}; }
  template <int I, int N> void add(Ints codes, const Operands<N>& x) {
    sum = add_products(add_products(sum, codes & set1_words(255), x.template one<I * 2>()), words_right<8>(codes),
                       x.template one<I * 2 + 1>());
  }
  Ints total() const { return sum; }
};
template <> struct Sum<1, true> {
  Ints sum;
  static Sum from(int start) { return {set1_ints(start)}; }
  Ints total() const { return sum; }
};
#endif

// sums[r] += 16 k of kLanes columns, half HALF of the 32 of `from`, times rows r < ROWS.
template <int HALF, int ROWS, typename CODES, int DWORDS, bool NARROW>
__attribute__((always_inline)) inline void add_codes(const CODES& from, const int32_t* x, Sum<DWORDS, NARROW>* sums) {
#if !QUIRE_BYTE_PRODUCTS
  if constexpr (DWORDS == 1) {
    constexpr int TOGETHER = CODES::kTogether;
    Ints codes[4];
    from.template read<HALF>([&](int i, Ints bytes) __attribute__((always_inline)) { codes[i] = bytes; });
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      unrolled<4 / TOGETHER>([&](auto part) __attribute__((always_inline)) {
        constexpr int at = part * TOGETHER;
        sums[r].sum = add_small_products<TOGETHER>(sums[r].sum, codes + at, x + at * ROWS + r, ROWS);
      });
    });
    return;
  } else
#endif
  {
    const Operands<4 * ROWS * DWORDS> operands(x);
    from.template read<HALF>([&](auto i, Ints codes) __attribute__((always_inline)) {
      unrolled<ROWS>(
          [&](auto r) __attribute__((always_inline)) { sums[r].template add<i * ROWS + r>(codes, operands); });
    });
  }
}

// The same for several registers of columns whose codes are unpacked: all of them multiply by an entry of x before the
// next one, so that it is loaded once.
template <int HALF, int ROWS, int PARTS, typename CODES, int DWORDS, bool NARROW>
__attribute__((always_inline)) inline void add_together(const CODES (&from)[PARTS], const int32_t* x,
                                                        Sum<DWORDS, NARROW> (&sums)[PARTS][ROWS]) {
  const Operands<4 * ROWS * DWORDS> operands(x);
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    Ints codes[PARTS];
    unrolled<PARTS>([&](auto p) __attribute__((always_inline)) { codes[p] = from[p].four(HALF * 4 + i); });
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      unrolled<PARTS>([&](auto p) __attribute__((always_inline)) {
        sums[p][r].template add<i * ROWS + r>(codes[p], operands);
      });
    });
  });
}

// The scales and offsets of `columns` columns in the spans of a run of k, [span][32].
struct RunNumbers {
  alignas(64) float scales[IntegerRows::kRun / 16][kCols], offsets[IntegerRows::kRun / 16][kCols];
};

// Converts `columns` entries of a table, from `column` on, for each of `spans` spans of k.
template <typename T>
__attribute__((always_inline)) inline void convert_numbers(const T* from, long spans, int column, int columns,
                                                           float (*to)[kCols]) {
  for (long i = 0; i < spans; i++, from += kCols)
    for (int c = column; c < column + columns; c += kLanes) store_floats(to[i] + c, load_floats(from + c));
}
inline void convert_halves(const Quant& q, const void* table, long at, long spans, int column, int columns,
                           float (*to)[kCols]) {
  if (q.half) convert_numbers((const f16*)table + at, spans, column, columns, to);
  else convert_numbers((const bf16*)table + at, spans, column, columns, to);
}

template <int KIND>
__attribute__((noinline)) void find_numbers(const Quant& q, int nb, long begin, long end, int column, int columns,
                                            RunNumbers& to) {
  if constexpr (is_super_kind(KIND)) {
    using Scales = SuperScales<KIND>;
    for (int c = column; c < column + columns; c += kLanes) {
      const Scales scales(q.super(nb, int(begin / 256)), c);
      unrolled<256 / Scales::kGroup>([&](auto i) {
        store_floats(to.scales[i] + c, scales.template scale<i>());
        if constexpr (kKinds[KIND].offsets) store_floats(to.offsets[i] + c, scales.template offset<i>());
      });
    }
  } else {
    const long place = q.group_at(nb, int(begin)), spans = (end - begin + q.span() - 1) / q.span();
    if constexpr (KIND == kFloats4) {
      const uint8_t* from = (const uint8_t*)q.scales + place;
      for (long i = 0; i < spans; i++, from += kCols)
        for (int c = column; c < column + columns; c += kLanes) store_floats(to.scales[i] + c, half_power(from + c));
    } else {
      convert_halves(q, q.scales, place, spans, column, columns, to.scales);
    }
    if (kKinds[KIND].offsets || (KIND <= kIntegers8 && q.offsets))
      convert_halves(q, q.offsets, place, spans, column, columns, to.offsets);
  }
}

// Prefetch distances in bytes of a stream of codes, into L2 and L1: 3 - 7 % faster than those of read_ahead, but 10 %
// slower for codes of 8 bits.
constexpr int kCodesAhead = 24 << 10, kCodesNext = 2 << 10;

// The codes of a run of kLanes columns as they are stored.
template <int KIND>
struct StoredCodes {
  // How many pairs of products of codes and bytes fit a word
  static constexpr int kTogether = top_code(KIND) < 32 ? 4 : 2;
  static constexpr bool kSixteen = kKinds[KIND].group == 16, kZeroPoint = quant_zero_point(KIND) != 0,
                        kUnpacked = false;
  const uint8_t* at;
  int odd;  // whether `at` is the second half of a step of a tile
  template <int HALF, typename F>
  __attribute__((always_inline)) void read(F&& f) const {
    codes_of<KIND>(at, HALF, [&](auto i, Ints codes) __attribute__((always_inline)) {
      f(i, byte_offset(KIND) ? sub_bytes(codes, set1_words(0x8080)) : codes);
    });
  }
  void next() { at += odd ? quant_bits(KIND) * 192 : quant_bits(KIND) * 64, odd ^= 1; }
  __attribute__((always_inline)) void prefetch() const {  // else GCC takes it for a function without effect
    for (const uint8_t* line = at; line < at + quant_bits(KIND) * 64; line += 64)
      if (quant_bits(KIND) == 8) read_ahead(line);
      else
        prefetch_l2(line + kCodesAhead), prefetch_l1(line + kCodesNext);
  }
};

// The same as bytes [k / 4][kLanes][4]: unpacked, or codes of 8 bits as they are stored.
template <bool SIXTEEN>
struct UnpackedCodes {
  static constexpr int kTogether = 2;
  static constexpr bool kSixteen = SIXTEEN, kZeroPoint = true, kUnpacked = true;
  const uint8_t* at;
  int skip = 0;  // bytes to skip after every 64 k
  int odd = 0;   // as in StoredCodes
  template <int HALF, typename F>
  __attribute__((always_inline)) void read(F&& f) const {
    unrolled<4>([&](auto i) __attribute__((always_inline)) { f(i, four(HALF * 4 + i)); });
  }
  Ints four(int i) const { return load_ints(at + i * sizeof(Ints)); }  // k 4 i .. 4 i + 3
  void next() { at += 8 * sizeof(Ints) + (odd ? skip : 0), odd ^= 1; }
  void prefetch() const {}
};

// y[ROWS][32] += group `group` of x, k begin .. end - 1 (a run), times PARTS registers of columns from `column` on.
// BY_SPAN: as in IntegerRows.
template <typename CODES, int DWORDS, bool NARROW, bool BY_SPAN, int ROWS, int PARTS>
__attribute__((always_inline)) inline void quant_run(const IntegerRows& x, int group, long begin, long end, int span,
                                                     CODES (&codes)[PARTS], const RunNumbers& numbers, bool has_offsets,
                                                     int column, float* y) {
  using RowSum = Sum<DWORDS, NARROW>;
  const long ld = x.ld();
  const int32_t *values = x.values(group, begin), *starts = x.starts(group, begin);
  const float *row_sums = x.sums(group, begin), *row_scales = x.scales(group, begin);
  Floats totals[PARTS][ROWS] = {};
  RowSum sums[PARTS][ROWS];
  int i = 0;  // index of the span
  auto start = [&] __attribute__((always_inline)) {
    unrolled<PARTS * ROWS>([&](auto n) __attribute__((always_inline)) {
      sums[n / ROWS][n % ROWS] = RowSum::from(CODES::kZeroPoint ? starts[n % ROWS] : 0);
    });
    starts += ld;
  };
  auto add_half = [&](auto half) __attribute__((always_inline)) {
    if constexpr (PARTS > 1 && CODES::kUnpacked) add_together<half, ROWS>(codes, values, sums);
    else
      unrolled<PARTS>([&](auto p) __attribute__((always_inline)) { add_codes<half, ROWS>(codes[p], values, sums[p]); });
    values += 4 * DWORDS * ROWS;
  };
  auto apply = [&] __attribute__((always_inline)) {
    unrolled<PARTS>([&](auto p) __attribute__((always_inline)) {
      const Floats scale = load_floats(numbers.scales[i] + column + p * kLanes);
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        totals[p][r] =
            fma(to_floats(sums[p][r].total()), BY_SPAN ? scale * set1_floats(row_scales[r]) : scale, totals[p][r]);
      });
      if (has_offsets) {
        const Floats offset = load_floats(numbers.offsets[i] + column + p * kLanes);
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          totals[p][r] = fma(offset, set1_floats(row_sums[r]), totals[p][r]);
        });
      }
    });
    row_sums += ld, i++;
    if constexpr (BY_SPAN) row_scales += ld;
  };
  for (long k = begin, stop; k < end; k = stop) {
    stop = std::min<long>(k + std::max(span, 32), end);
    start();
    for (long at = k; at < stop; at += 32) {
      unrolled<PARTS>([&](auto p) __attribute__((always_inline)) {
        if constexpr (p * kLanes % 16 == 0) codes[p].prefetch();  // else its lines are those of the part before
      });
      add_half(std::integral_constant<int, 0>());
      if (CODES::kSixteen) apply(), start();
      add_half(std::integral_constant<int, 1>());
      unrolled<PARTS>([&](auto p) __attribute__((always_inline)) { codes[p].next(); });
    }
    apply();
  }
  unrolled<PARTS * ROWS>([&](auto n) __attribute__((always_inline)) {
    float* to = y + n % ROWS * kCols + column + n / ROWS * kLanes;
    const Floats total = totals[n / ROWS][n % ROWS];
    store_floats(to,
                 BY_SPAN ? total + load_floats(to) : fma(total, set1_floats(row_scales[n % ROWS]), load_floats(to)));
  });
}

// Maximum rows that use the codes as they are stored; more share unpacked ones, whose code is the same for many kinds.
constexpr int kStoredRows = kLanes == 16 ? 4 : 2;

// y[ROWS][32] = x times block nb.
template <int KIND, bool NARROW, int ROWS>
void few_rows(const Quant& q, const IntegerRows& x, int nb, float* y) {
  // Registers of columns together: more independent sums, to hide latency. dotprod has registers for all columns.
  constexpr int DWORDS = IntegerRows::dwords(KIND, NARROW),
                PARTS = ROWS == 1 && DWORDS == 1 && kLanes == 8 && QUIRE_BYTE_PRODUCTS ? 4 : ROWS <= 2 ? 2 : 1;
  const bool has_offsets = kKinds[KIND].offsets || (KIND <= kIntegers8 && q.offsets);
  RunNumbers numbers;
  for (int column = 0; column < kCols; column += PARTS * kLanes)
    for (long begin = 0; begin < x.width(); begin += IntegerRows::kRun) {
      const long end = std::min(begin + IntegerRows::kRun, x.width());
      find_numbers<KIND>(q, nb, begin, end, column, PARTS * kLanes, numbers);
      StoredCodes<KIND> codes[PARTS];
      unrolled<PARTS>([&](auto p) { codes[p] = {codes_at(q, nb, int(begin), column + p * kLanes), 0}; });
      quant_run<StoredCodes<KIND>, DWORDS, NARROW, IntegerRows::by_span(KIND, NARROW), ROWS, PARTS>(
          x, 0, begin, end, q.span(), codes, numbers, has_offsets, column, y);
    }
}

// Whether the codes of a kind are used as they are stored, because they are bytes
constexpr bool are_bytes(int kind) { return kLanes == 16 && quant_bits(kind) == 8; }
constexpr long kUnpackedBytes = IntegerRows::kRun * kLanes;

// y[ROWS][32] += a group of more rows, one run, times PARTS registers of columns, whose codes are unpacked.
template <bool SIXTEEN, int DWORDS, bool NARROW, bool BY_SPAN, int ROWS, int PARTS>
void unpacked_run(const IntegerRows& x, int group, long begin, long end, int span, const uint8_t* bytes,
                  long part_bytes, int skip, const RunNumbers& numbers, bool has_offsets, int column, float* y) {
  UnpackedCodes<SIXTEEN> codes[PARTS];
  for (int p = 0; p < PARTS; p++) codes[p] = {bytes + p * part_bytes, skip};
  quant_run<UnpackedCodes<SIXTEEN>, DWORDS, NARROW, BY_SPAN, ROWS, PARTS>(x, group, begin, end, span, codes, numbers,
                                                                          has_offsets, column, y);
}

// y[rows of x][32] += x times block nb, for more rows. The codes of a run are unpacked once for all of them.
// PARTS: the registers of columns that are multiplied together.
template <int KIND, bool NARROW, int PARTS>
void many_rows(const Quant& q, const IntegerRows& x, int nb, float* y) {
  constexpr int DWORDS = IntegerRows::dwords(KIND, NARROW),
                MOST = IntegerRows::group_rows(DWORDS, PARTS == 2 ? INT_MAX : 0);
  const bool has_offsets = kKinds[KIND].offsets || (KIND <= kIntegers8 && q.offsets);
  RunNumbers numbers;
  alignas(64) uint8_t bytes[PARTS * kUnpackedBytes];
  for (long begin = 0; begin < x.width(); begin += IntegerRows::kRun)
    for (int column = 0; column < kCols; column += PARTS * kLanes) {
      const long end = std::min(begin + IntegerRows::kRun, x.width());
      find_numbers<KIND>(q, nb, begin, end, column, PARTS * kLanes, numbers);
      const uint8_t* stored = codes_at(q, nb, int(begin), column);
      for (int p = 0; p < PARTS; p++) {
        StoredCodes<KIND> codes{codes_at(q, nb, int(begin), column + p * kLanes), 0};
        uint8_t* to = bytes + p * kUnpackedBytes;
        for (long k = begin; k < end; k += 32, to += 8 * sizeof(Ints), codes.next()) {
          codes.prefetch();
          if constexpr (are_bytes(KIND)) continue;
          codes.template read<0>([&](int i, Ints four) { store_ints(to + i * sizeof(Ints), four); });
          codes.template read<1>([&](int i, Ints four) { store_ints(to + (4 + i) * sizeof(Ints), four); });
        }
      }
      for (int i = 0; i < x.groups(); i++)
        of_rows(x.size(i), [&](auto n) {
          if constexpr (n >= std::min(kStoredRows + 1, 4) && n <= MOST)
            unpacked_run<kKinds[KIND].group == 16, DWORDS, NARROW, IntegerRows::by_span(KIND, NARROW), n, PARTS>(
                x, i, begin, end, q.span(), are_bytes(KIND) ? stored : bytes, are_bytes(KIND) ? 1024 : kUnpackedBytes,
                are_bytes(KIND) ? 1024 : 0, numbers, has_offsets, column, y + x.begin(i) * kCols);
        });
    }
}

// y[rows of x][32] = x times block nb.
template <int KIND, bool NARROW>
void quant_block(const Quant& q, const IntegerRows& x, int nb, float* y) {
  std::fill(y, y + x.ld() * kCols, 0.f);
  constexpr int DWORDS = IntegerRows::dwords(KIND, NARROW);
  if constexpr (IntegerRows::by_two(DWORDS, INT_MAX))
    if (IntegerRows::by_two(DWORDS, int(x.ld()))) return many_rows<KIND, NARROW, 2>(q, x, nb, y);
  if (x.ld() > kStoredRows) return many_rows<KIND, NARROW, 1>(q, x, nb, y);
  of_rows(int(x.ld()), [&](auto n) {
    if constexpr (n <= kStoredRows) few_rows<KIND, NARROW, n>(q, x, nb, y);
  });
}

// The function for a kind.
template <bool SUPER, bool NARROW>
QuantBlock quant_block_of_kind(int kind) {
  QuantBlock block = nullptr;
  of_kind(kind, [&](auto constant) {
    if constexpr (constant != kFloats8 && is_super_kind(constant) == SUPER) block = quant_block<constant, NARROW>;
  });
  return block;
}

}  // namespace
