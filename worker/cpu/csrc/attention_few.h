// Products of few rows with keys and values where they are in the cache, without tiles.
#pragma once

#include "attention_keys.h"

namespace {

constexpr int kMostBytes = 512;  // elements of a query whose products with bytes have a sum of 32 bits

// Rows of queries as integers of 16 bits, whose products with keys in bytes are exact. With AVX-512 they are split into
// two signed bytes, 256 * high + low: one instruction computes four products of bytes.
struct QueryBytes {
  float units[4];            // of each row
  int high[4], low[4];       // what sums begin with: keys are offset by 128, so that they are unsigned
  const int* at;             // [d / 4][rows] dwords of high bytes, then as many of low bytes; AVX2: words [rows][d]

  // row(r) points to row r of `rows` rows; memory has room for rows * d floats.
  template <typename F>
  void fill(float* memory, int rows, long d, F&& row) {
    int8_t *highs = (int8_t*)memory, *lows = highs + rows * d;
    at = (const int*)memory;
    for (int r = 0; r < rows; r++) {
      const auto* from = row(r);
      vf top = zero();
      for (long c = 0; c < d; c += 16) top = max(top, max(load(from + c), zero() - load(from + c)));
      const float largest = reduce_max(top);
      units[r] = largest / 32512;
      const vf inverse = set1(largest > kLeast ? 32512 / largest : 0.f);
      int sum_high = 0, sum_low = 0;
      if (kLanes == 8) {
        for (long c = 0; c < d; c += 16) store_words((int16_t*)memory + r * d + c, load(from + c) * inverse);
        continue;
      }
      for (long c = 0; c < d; c += 16) {
        alignas(64) float x[16];
        store(x, nearest(load(from + c) * inverse));
        for (int i = 0; i < 16; i++) {
          const int value = int(x[i]), h = (value + 128) >> 8;
          const long place = ((c + i) / 4 * rows + r) * 4 + i % 4;
          highs[place] = int8_t(h), lows[place] = int8_t(value - h * 256);
          sum_high += h, sum_low += value - h * 256;
        }
      }
      high[r] = -128 * sum_high, low[r] = -128 * sum_low;
    }
  }
};

#if defined(__AVX512VNNI__)
constexpr bool kByteProducts = true;

// Like score_few below, for keys in bytes.
template <int ROWS, typename Ahead>
void score_bytes(const QueryBytes& queries, const int8_t* const* k, long d, float* x, Ahead& ahead) {
  const int *highs = queries.at, *lows = highs + ROWS * d / 4;
  const __m512i offset = _mm512_set1_epi8(-128);
  for (int j = 0; j < 32; j += 16) {
    __m512i high[ROWS], low[ROWS];
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      high[r] = set1_ints(queries.high[r]), low[r] = set1_ints(queries.low[r]);
    });
    for (long c = 0; c < d; c += 64) {
      const long count = std::min(64L, d - c);
      __m512i keys[16];
      if (count == 64)
        unrolled<16>([&](auto i) __attribute__((always_inline)) {
          keys[i] = _mm512_xor_si512(load_ints(k[j + i] + c), offset);
        });
      else
        unrolled<16>([&](auto i) __attribute__((always_inline)) {
          keys[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8((1ULL << count) - 1, k[j + i] + c), offset);
        });
      transpose_16x16(keys);
      const int *at_high = highs + c / 4 * ROWS, *at_low = lows + c / 4 * ROWS;
      const auto step = [&](auto p) __attribute__((always_inline)) {
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          high[r] = _mm512_dpbusd_epi32(high[r], keys[p], set1_ints(at_high[p * ROWS + r]));
          low[r] = _mm512_dpbusd_epi32(low[r], keys[p], set1_ints(at_low[p * ROWS + r]));
        });
      };
      unrolled<16>([&](auto p) __attribute__((always_inline)) {
        if (p * 4 < count) step(p);
        if (p % 2 && p * 4 < count) ahead.fetch(1, int(d));
      });
    }
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      store_floats(x + r * kKeys + j,
                   fma(to_floats(high[r]), set1_floats(256.f), to_floats(low[r])) * set1_floats(queries.units[r]));
    });
  }
}
#elif !defined(__AVX512F__)
constexpr bool kByteProducts = true;

// Like score_few below, for keys in bytes and d up to kMostBytes: products of words, four keys and two rows at a time.
template <int ROWS, typename Ahead>
void score_bytes(const QueryBytes& queries, const int8_t* const* k, long d, float* x, Ahead& ahead) {
  const int16_t* words = (const int16_t*)queries.at;
  for (int j = 0; j < 32; j += 4)
    unrolled<(ROWS + 1) / 2>([&](auto pair) __attribute__((always_inline)) {
      constexpr int FIRST = pair * 2, COUNT = std::min(2, ROWS - FIRST);
      Ints sums[4][COUNT];
      unrolled<4 * COUNT>([&](auto i) __attribute__((always_inline)) { sums[i / COUNT][i % COUNT] = Ints(); });
      for (long c = 0; c < d; c += 16) {
        unrolled<4>([&](auto i) __attribute__((always_inline)) {
          const Ints key = words_of_bytes(k[j + i] + c);
          unrolled<COUNT>([&](auto r) __attribute__((always_inline)) {
            sums[i][r] = add_products(sums[i][r], key, load_ints(words + (FIRST + r) * d + c));
          });
        });
        if (FIRST == 0 && c % 64 == 0) ahead.fetch(1, int(d));
      }
      unrolled<COUNT>([&](auto r) __attribute__((always_inline)) {
        const Ints four[4] = {sums[0][r], sums[1][r], sums[2][r], sums[3][r]};
        store_totals(x + (FIRST + r) * kKeys + j, four, queries.units[FIRST + r]);
      });
    });
}
#else
constexpr bool kByteProducts = false;
template <int ROWS, typename Ahead>
void score_bytes(const QueryBytes&, const int8_t* const*, long, float*, Ahead&) {}
#endif

#if defined(__AVX512BF16__)
constexpr bool kPairProducts = true;

// The sums of four registers' entries, each in the four entries of a quarter: of a, b, c and d in this order.
inline __m512i add_across(__m512i a, __m512i b, __m512i c, __m512i d) {
  const auto add = [](__m512i low, __m512i high) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)));
  };
  const __m512i ab = add(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee)),
                cd = add(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xee));
  return add(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
}

// Like score_few below, for keys and queries in bf16, q [ROWS][d], and d a multiple of 32: products of keys as they are
// stored, whose sums are then added across registers.
template <int ROWS, typename Ahead>
void score_pairs(const bf16* q, const bf16* const* k, long d, float* x, Ahead& ahead) {
  constexpr int SETS = ROWS <= 2 ? 2 : 1;  // sets of four keys at a time: enough independent sums
  const auto add = [](__m512i low, __m512i high) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)));
  };
  for (int j = 0; j < 32; j += 16) {
    __m512i quarters[ROWS][4];  // [i]: keys i, i + 4, i + 8 and i + 12
    unrolled<4 / SETS>([&](auto part) __attribute__((always_inline)) {
      constexpr int FIRST = part * SETS;
      __m512 sums[4 * SETS][ROWS];
      unrolled<4 * SETS * ROWS>([&](auto i)
                                    __attribute__((always_inline)) { sums[i / ROWS][i % ROWS] = _mm512_setzero_ps(); });
      for (long c = 0; c < d; c += 32) {
        __m512i queries[ROWS];
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { queries[r] = load_ints(q + r * d + c); });
        unrolled<4 * SETS>([&](auto i) __attribute__((always_inline)) {
          const __m512i key = load_ints(k[j + FIRST + i / 4 + i % 4 * 4] + c);
          unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
            sums[i][r] = _mm512_dpbf16_ps(sums[i][r], (__m512bh)key, (__m512bh)queries[r]);
          });
          if (i % 2) ahead.fetch(1, int(d * sizeof(bf16)));
        });
      }
      unrolled<SETS * ROWS>([&](auto i) __attribute__((always_inline)) {
        constexpr int SET = i / ROWS, R = i % ROWS;
        const auto ints = [&](int n) { return _mm512_castps_si512(sums[SET * 4 + n][R]); };
        quarters[R][FIRST + SET] = add_across(ints(0), ints(1), ints(2), ints(3));
      });
    });
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      const __m512i* of = quarters[r];
      const __m512i even = add(_mm512_unpacklo_epi32(of[0], of[1]), _mm512_unpackhi_epi32(of[0], of[1])),
                    odd = add(_mm512_unpacklo_epi32(of[2], of[3]), _mm512_unpackhi_epi32(of[2], of[3]));
      store_ints(x + r * kKeys + j, add(_mm512_unpacklo_epi64(even, odd), _mm512_unpackhi_epi64(even, odd)));
    });
  }
}
#else
constexpr bool kPairProducts = false;
template <int ROWS, typename Ahead>
void score_pairs(const bf16*, const bf16* const*, long, float*, Ahead&) {}
#endif

// For a few rows, which read keys and values without packing. `ahead` prefetches (fetch(lines, bytes of a key)), here
// and below. Computes x[r][32] = the products of ROWS queries, stored
// k by k, with 32 keys. CHAINS: partial sums per product; 2: one of even k and one of odd k; 1: a single sum in order.
template <int ROWS, int CHAINS, typename T, typename Ahead>
void score_few(const float* q, const T* const* k, long d, float* x, Ahead& ahead) {
  // Registers of keys at a time: enough independent sums to hide the latency of fma.
  constexpr int TILES = std::min(32 / kLanes, std::max(1, 8 / ROWS / CHAINS));
  for (int j = 0; j < 32; j += TILES * kLanes) {
    Floats sums[CHAINS][TILES * ROWS] = {};
    for (long c = 0, step; c < d; c += step) {
      unrolled<TILES>([&](auto tile) __attribute__((always_inline)) {
        asm volatile("" ::: "memory");  // prevents the compiler from spilling a step's queries for the next tile
        step = transposed(k + j + tile * kLanes, c, d, [&](auto i, Floats keys) __attribute__((always_inline)) {
          unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { Floats& sum = sums[i % CHAINS][tile * ROWS + r];
            sum = fma(keys, set1_floats(q[(c + i) * ROWS + r]), sum);
          });
        });
        ahead.fetch(int(step * kLanes * sizeof(T) / 128), int(d * sizeof(T)));
      });
    }
    unrolled<TILES * ROWS>([&](auto i) __attribute__((always_inline)) {
      store_floats(x + i % ROWS * kKeys + j + i / ROWS * kLanes,
                   CHAINS == 2 ? sums[0][i] + sums[CHAINS - 1][i] : sums[0][i]);
    });
  }
}

// Computes acc[r][ld] += the sum over 32 keys j of x[r][j] * v[j], for elements c .. c + 16 * WIDTH - 1.
template <int ROWS, int WIDTH, typename T, typename Ahead>
__attribute__((always_inline)) inline void add_columns(const float* x, const T* const* v, long c, long d, float* acc,
                                                       long ld, Ahead& ahead) {
  // Scores by products of bytes take much less time than this: then three lines of four are fetched here.
  constexpr bool MOST = kByteProducts && std::is_same_v<T, int8_t>;
  constexpr int BYTES = 16 * WIDTH * sizeof(T) * (MOST ? 3 : 2) / 2, EVERY = std::max(1, 128 / BYTES);  // keys a fetch
  vf sums[ROWS * WIDTH];
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { sums[i] = load(acc + i / WIDTH * ld + c + i % WIDTH * 16); });
  for (int j = 0; j < 32; j++) {
    vf weights[ROWS];
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { weights[r] = set1(x[r * kKeys + j]); });
    unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) {
      const vf values = load(v[j] + c + i * 16);
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        sums[r * WIDTH + i] = fma(values, weights[r], sums[r * WIDTH + i]);
      });
    });
    if (j % EVERY == 0) ahead.fetch((BYTES * EVERY + 64) / 128, int(d * sizeof(T)));
  }
  unrolled<ROWS * WIDTH>(
      [&](auto i) __attribute__((always_inline)) { store(acc + i / WIDTH * ld + c + i % WIDTH * 16, sums[i]); });
}

template <int ROWS, typename T, typename Ahead>
void add_few(const float* x, const T* const* v, long d, float* acc, long ld, Ahead& ahead) {
  constexpr int WIDTH = kLanes == 16 ? (ROWS <= 2 ? 8 : 4) : ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
  long c = 0;
  for (; c + 16 * WIDTH <= d; c += 16 * WIDTH)
    add_columns<ROWS, WIDTH>(x, v, c, d, acc, ld, ahead);
  for (; c < d; c += 16)
    add_columns<ROWS, 1>(x, v, c, d, acc, ld, ahead);
}

}  // namespace
