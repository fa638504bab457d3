// Attention with vectors, of either width and for any dtype: blocked flash attention
// (https://arxiv.org/abs/2205.14135), 128 keys at a time.
//
// Rows (tokens x query heads of one KV head) are converted to floats in groups of up to kMostRows, stored k by k so
// that operands are contiguous in the order of use. Keys and values become tiles of floats, 32 of k by 32 columns; the
// columns of a key tile are keys, those of a value tile are elements. If there are enough rows to use them more than
// once, all tiles of the 128 keys are packed first and stay in L2. Otherwise each tile is used right after it is
// packed, in L1.
//
// With ONE_ORDER, every sum is in the order of k or of keys for any number of rows, and keys that a row does not see
// add zeros: a row's result depends on no other row.
#pragma once

#include "attention.h"
#include "fixed_tiles.h"

namespace {

constexpr int kKeys = 128;

// Continues the online softmax of a row: replaces x, the products of its query with 16 V keys, with weights relative to
// the running maximum m, and updates m and the running sum. Keys outside [lo, hi) get weight 0. Returns the factor by
// which the earlier results must be multiplied.
template <int V>
inline float weigh(const Layer& l, float* x, long lo, long hi, float& m, float& sum) {
  const int first = int(std::min(lo, 16L * V)), last = int(std::max(hi, 0L));
  vf v[V], top = set1(kNegInf);
  auto masked = [&](int i) { return first > 16 * i || last < 16 * i + 16; };
  auto seen = [&](int i, float unseen) { return masked(i) ? select_range(v[i], first - 16 * i, last - 16 * i, set1(unseen)) : v[i]; };
  for (int i = 0; i < V; i++) {
    v[i] = load(x + 16 * i);
    v[i] = l.soft_cap > 0 ? tanh(v[i] * set1(l.scale / l.soft_cap)) * set1(l.soft_cap * kLog2e) : v[i] * set1(l.scale * kLog2e);
    v[i] = seen(i, kNegInf);
    top = max(top, v[i]);
  }
  const float before = m, now = std::max(before, reduce_max(top));
  if (std::isinf(now)) {  // -inf: no key so far; +inf: a product overflowed, so the result is NaN
    for (int i = 0; i < V; i++) store(x + 16 * i, zero());
    if (now < 0) return 1.f;
    m = now;
    return sum = std::numeric_limits<float>::quiet_NaN();
  }
  vf total = zero();
  for (int i = 0; i < V; i++) {
    v[i] = exp2(v[i] - set1(now));
    v[i] = seen(i, 0.f);
    store(x + 16 * i, v[i]);
    total = total + v[i];
  }
  const float correction = before == now ? 1.f : std::exp2(before - now);
  m = now;
  sum = sum * correction + reduce_add(total);
  return correction;
}

// Computes sums[r * ld + column] += the sum over k < count of x[r * R + k * K] * tile[k][column], for ROWS rows and the
// 32 columns of a tile. Tiles are contiguous along k.
template <int ROWS, int R, int K>
void tile_products(const float* x, const float* tile, int count, float* sums, long ld) {
  constexpr int WIDTH = ROWS <= kRowsOfAll ? 32 / kLanes : 2;  // registers per row
  for (int c = 0; c < 32; c += WIDTH * kLanes) {
    Floats acc[ROWS * WIDTH];
    unrolled<ROWS * WIDTH>([&](auto i) __attribute__((always_inline)) { acc[i] = load_floats(sums + i / WIDTH * ld + c + i % WIDTH * kLanes); });
    const float *at = x, *w = tile + c;
    for (int k = 0; k < count; k++, at += K, w += 32) {
      Floats v[WIDTH];
      unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) { v[i] = load_floats(w + i * kLanes); });
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        const Floats one = set1_floats(at[r * R]);
        unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) { acc[r * WIDTH + i] = fma(v[i], one, acc[r * WIDTH + i]); });
      });
    }
    unrolled<ROWS * WIDTH>([&](auto i) __attribute__((always_inline)) { store_floats(sums + i / WIDTH * ld + c + i % WIDTH * kLanes, acc[i]); });
  }
}

// Pointers to 128 keys of a KV head and their values in the cache. Keys outside the wanted range point to one inside
// it.
template <typename T>
struct KeyBlock {
  const T *k[kKeys], *v[kKeys];
  const int* table;       // block table of the keys
  long head, start;       // their KV head; position of the first wanted key
  int begin = 0, end = 0;  // the wanted keys
  int row = 0, line = 0;  // the next key, and the byte in it, to prefetch

  void locate(const Layer& l, const int* of_table, long of_head, long key, long first, long last) {
    table = of_table, head = of_head, start = std::max(key, first);
    long block = start / l.block_size, slot = start % l.block_size;
    const int lo = int(start - key);
    begin = lo, end = int(std::min(long(kKeys), last - key)), row = lo, line = 0;
    for (int j = lo; j < end; j++) {
      if (kScaled<T> && (j == lo || slot == 0)) {
        _mm_prefetch((const char*)l.k_scales.at(table[block], slot, head), _MM_HINT_T1);
        _mm_prefetch((const char*)l.v_scales.at(table[block], slot, head), _MM_HINT_T1);
      }
      k[j] = (const T*)l.k_cache + table[block] * l.k_block + slot * l.k_slot + head * l.k_head;
      v[j] = (const T*)l.v_cache + table[block] * l.v_block + slot * l.v_slot + head * l.v_head;
      if (++slot == l.block_size) slot = 0, block++;
    }
    std::fill(k, k + lo, k[lo]), std::fill(v, v + lo, v[lo]);
    std::fill(k + end, k + kKeys, k[end - 1]), std::fill(v + end, v + kKeys, v[end - 1]);
  }

  // Writes the scales of the keys [kKeys], 0 for those that are not wanted: what load() returns times the scale is the
  // number.
  void scales(const Layer& l, const Scales& of, float* to) const {
    std::fill(to, to + begin, 0.f), std::fill(to + end, to + kKeys, 0.f);
    long block = start / l.block_size, slot = start % l.block_size;
    for (int j = begin; j < end; slot = 0, block++) {
      const float* from = of.at(table[block], slot, head);
      const int n = int(std::min(long(end - j), l.block_size - slot));
      for (int i = 0; i < n; i++) to[j + i] = from[i * of.slot] * kLoadedPart<T>;
      j += n;
    }
  }

  // Prefetches the next `lines` cache lines of K and as many of V to L2. A key has `bytes` bytes.
  void fetch(int lines, int bytes) {
    if (row >= end) return;
    const char *at_k = (const char*)k[row] + line, *at_v = (const char*)v[row] + line;
    for (; lines > 0; lines--, at_k += 64, at_v += 64) {
      _mm_prefetch(at_k, _MM_HINT_T1);
      _mm_prefetch(at_v, _MM_HINT_T1);
      if ((line += 64) < bytes) continue;
      line = 0;
      if (++row >= end) return;
      at_k = (const char*)k[row] - 64, at_v = (const char*)v[row] - 64;
    }
  }
};

// Returns byte BYTE of each lane, in e4m3, as load() does. Its bits in the places of a float's are the number divided by
// 2^120.
template <int BYTE>
inline Floats e4m3_number(Ints x) {
  return Floats(signed_right<4>(left<24 - 8 * BYTE>(x)) & set1_ints(int(0x87f00000u))) * set1_floats(0x1p112f);
}

// Calls f(integral constant i, x) with x = k[0 .. kLanes - 1][c + i] for every i of a step, and returns the step's
// length: 2 * kLanes for bf16 and, with AVX-512, 4 * kLanes for e4m3 if that many elements remain, else 16.
template <typename T, typename F>
__attribute__((always_inline)) inline long transposed(const T* const* k, long c, long count, F&& f) {
  if constexpr (std::is_same_v<T, bf16>)
    if (c + 2 * kLanes <= count) {
      Ints r[kLanes];
      unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = load_ints(k[key] + c); });
      transpose(r);
      unrolled<kLanes>([&](auto p) __attribute__((always_inline)) {
        f(std::integral_constant<int, 2 * p>(), evens(r[p]));
        f(std::integral_constant<int, 2 * p + 1>(), odds(r[p]));
      });
      return 2 * kLanes;
    }
  if constexpr (std::is_same_v<T, e4m3> && kLanes == 16)
    if (c + 4 * kLanes <= count) {
      Ints r[kLanes];
      unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = load_ints(k[key] + c); });
      transpose(r);
      unrolled<kLanes>([&](auto p) __attribute__((always_inline)) {
        unrolled<4>([&](auto byte) __attribute__((always_inline)) { f(std::integral_constant<int, 4 * p + byte>(), e4m3_number<byte>(r[p])); });
      });
      return 4 * kLanes;
    }
  unrolled<16 / kLanes>([&](auto i) __attribute__((always_inline)) {
    Ints r[kLanes];
    unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = Ints(part(load(k[key] + c), i)); });
    transpose(r);
    unrolled<kLanes>([&](auto p) __attribute__((always_inline)) { f(std::integral_constant<int, i * kLanes + p>(), Floats(r[p])); });
  });
  return 16;
}

// Packs elements [c, c + 32) of 32 keys with d elements each into a tile whose columns are keys.
template <typename T>
void pack_keys(const T* const* k, long c, long d, float* tile) {
  for (int j = 0; j < 32; j += kLanes)
    for (long at = c; at < std::min(c + 32, d);) {
      float* to = tile + (at - c) * 32 + j;
      at += transposed(k + j, at, d, [&](auto i, Floats x) __attribute__((always_inline)) { store_floats(to + i * 32, x); });
    }
}

// Multiplies the columns of a tile of elements [c, c + 32) of 32 keys by their scales: `first` for elements before
// `rank`, `second` for the others.
inline void scale_tile(float* tile, long c, long d, long rank, const float* first, const float* second) {
  for (long i = 0; i < std::min(32L, d - c); i++, tile += 32) {
    const float* by = c + i < rank ? first : second;
    for (int j = 0; j < 32; j += 16) store(tile + j, load(tile + j) * load(by + j));
  }
}

// Packs elements [c, c + 32) of 32 values into a tile whose columns are elements. Pads with zeros from d on.
template <typename T>
void pack_values(const T* const* v, long c, long d, float* tile) {
  for (int j = 0; j < 32; j++)
    for (int i = 0; i < 32; i += 16) store(tile + j * 32 + i, c + i < d ? load(v[j] + c + i) : zero());
}

// Rows of queries as integers of 16 bits, split into two signed bytes: 256 * high + low. Products with keys in bytes are
// then exact sums of products of bytes, of which one instruction computes four.
struct QueryBytes {
  float units[4];            // of each row
  int high[4], low[4];       // what sums begin with: keys are offset by 128, so that they are unsigned
  const int* at;             // [d / 4][rows] dwords of high bytes, then as many of low bytes

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
template <int ROWS>
void score_bytes(const QueryBytes& queries, const float*, const int8_t* const* k, long d, float* x, KeyBlock<int8_t>& ahead) {
  const int *highs = queries.at, *lows = highs + ROWS * d / 4;
  const __m512i offset = _mm512_set1_epi8(-128);
  for (int j = 0; j < 32; j += 16) {
    __m512i high[ROWS], low[ROWS];
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { high[r] = set1_ints(queries.high[r]), low[r] = set1_ints(queries.low[r]); });
    for (long c = 0; c < d; c += 64) {
      const long count = std::min(64L, d - c);
      __m512i keys[16];
      if (count == 64) unrolled<16>([&](auto i) __attribute__((always_inline)) { keys[i] = _mm512_xor_si512(load_ints(k[j + i] + c), offset); });
      else unrolled<16>([&](auto i) __attribute__((always_inline)) { keys[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8((1ULL << count) - 1, k[j + i] + c), offset); });
      transpose_16x16(keys);
      const int *at_high = highs + c / 4 * ROWS, *at_low = lows + c / 4 * ROWS;
      const auto step = [&](auto p) __attribute__((always_inline)) {
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          high[r] = _mm512_dpbusd_epi32(high[r], keys[p], set1_ints(at_high[p * ROWS + r]));
          low[r] = _mm512_dpbusd_epi32(low[r], keys[p], set1_ints(at_low[p * ROWS + r]));
        });
      };
      unrolled<16>([&](auto p) __attribute__((always_inline)) { if (p * 4 < count) step(p); });
      ahead.fetch(int(count / 4), int(d));
    }
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      store_floats(x + r * kKeys + j, fma(to_floats(high[r]), set1_floats(256.f), to_floats(low[r])) * set1_floats(queries.units[r]));
    });
  }
}
#else
constexpr bool kByteProducts = false;
template <int ROWS>
void score_bytes(const QueryBytes&, const float*, const int8_t* const*, long, float*, KeyBlock<int8_t>&) {}
#endif

#if defined(__AVX512BF16__)
constexpr bool kPairProducts = true;

// The sums of four registers' entries, each in the four entries of a quarter: of a, b, c and d in this order.
inline __m512i add_across(__m512i a, __m512i b, __m512i c, __m512i d) {
  const auto add = [](__m512i low, __m512i high) { return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high))); };
  const __m512i ab = add(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee)), cd = add(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xee));
  return add(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
}

// Like score_few below, for keys and queries in bf16, q [ROWS][d], and d a multiple of 32: products of keys as they are
// stored, whose sums are then added across registers.
template <int ROWS>
void score_pairs(const bf16* q, const bf16* const* k, long d, float* x, KeyBlock<bf16>& ahead) {
  constexpr int SETS = ROWS <= 2 ? 2 : 1;  // sets of four keys at a time: enough independent sums
  const auto add = [](__m512i low, __m512i high) { return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high))); };
  for (int j = 0; j < 32; j += 16) {
    __m512i quarters[ROWS][4];  // [i]: keys i, i + 4, i + 8 and i + 12
    unrolled<4 / SETS>([&](auto part) __attribute__((always_inline)) {
      constexpr int FIRST = part * SETS;
      __m512 sums[4 * SETS][ROWS];
      unrolled<4 * SETS * ROWS>([&](auto i) __attribute__((always_inline)) { sums[i / ROWS][i % ROWS] = _mm512_setzero_ps(); });
      for (long c = 0; c < d; c += 32) {
        __m512i queries[ROWS];
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { queries[r] = load_ints(q + r * d + c); });
        unrolled<4 * SETS>([&](auto i) __attribute__((always_inline)) {
          const __m512i key = load_ints(k[j + FIRST + i / 4 + i % 4 * 4] + c);
          unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { sums[i][r] = _mm512_dpbf16_ps(sums[i][r], (__m512bh)key, (__m512bh)queries[r]); });
        });
      }
      ahead.fetch(int(SETS * d / 16), int(d * sizeof(bf16)));
      unrolled<SETS * ROWS>([&](auto i) __attribute__((always_inline)) {
        constexpr int SET = i / ROWS, R = i % ROWS;
        const auto ints = [&](int n) { return _mm512_castps_si512(sums[SET * 4 + n][R]); };
        quarters[R][FIRST + SET] = add_across(ints(0), ints(1), ints(2), ints(3));
      });
    });
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      const __m512i* of = quarters[r];
      const __m512i even = add(_mm512_unpacklo_epi32(of[0], of[1]), _mm512_unpackhi_epi32(of[0], of[1])), odd = add(_mm512_unpacklo_epi32(of[2], of[3]), _mm512_unpackhi_epi32(of[2], of[3]));
      store_ints(x + r * kKeys + j, add(_mm512_unpacklo_epi64(even, odd), _mm512_unpackhi_epi64(even, odd)));
    });
  }
}
#else
constexpr bool kPairProducts = false;
template <int ROWS>
void score_pairs(const bf16*, const bf16* const*, long, float*, KeyBlock<bf16>&) {}
#endif

// For a few rows, which read keys and values without packing: computes x[r][32] = the products of ROWS queries, stored
// k by k, with 32 keys. CHAINS: partial sums per product; 2: one of even k and one of odd k; 1: a single sum in order.
template <int ROWS, int CHAINS, typename T>
void score_few(const float* q, const T* const* k, long d, float* x, KeyBlock<T>& ahead) {
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
      });
      ahead.fetch(int(step * TILES * kLanes * sizeof(T) / 128), int(d * sizeof(T)));
    }
    unrolled<TILES * ROWS>([&](auto i) __attribute__((always_inline)) {
      store_floats(x + i % ROWS * kKeys + j + i / ROWS * kLanes, CHAINS == 2 ? sums[0][i] + sums[CHAINS - 1][i] : sums[0][i]);
    });
  }
}

// Computes acc[r][ld] += the sum over 32 keys j of x[r][j] * v[j], for elements c .. c + 16 * WIDTH - 1.
template <int ROWS, int WIDTH, typename T>
__attribute__((always_inline)) inline void add_columns(const float* x, const T* const* v, long c, float* acc, long ld) {
  vf sums[ROWS * WIDTH];
  unrolled<ROWS * WIDTH>([&](auto i) __attribute__((always_inline)) { sums[i] = load(acc + i / WIDTH * ld + c + i % WIDTH * 16); });
  for (int j = 0; j < 32; j++) {
    vf weights[ROWS];
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { weights[r] = set1(x[r * kKeys + j]); });
    unrolled<WIDTH>([&](auto i) __attribute__((always_inline)) {
      const vf values = load(v[j] + c + i * 16);
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { sums[r * WIDTH + i] = fma(values, weights[r], sums[r * WIDTH + i]); });
    });
  }
  unrolled<ROWS * WIDTH>([&](auto i) __attribute__((always_inline)) { store(acc + i / WIDTH * ld + c + i % WIDTH * 16, sums[i]); });
}

template <int ROWS, typename T>
void add_few(const float* x, const T* const* v, long d, float* acc, long ld, KeyBlock<T>& ahead) {
  constexpr int WIDTH = kLanes == 16 ? (ROWS <= 2 ? 8 : 4) : ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
  long c = 0;
  for (; c + 16 * WIDTH <= d; c += 16 * WIDTH) add_columns<ROWS, WIDTH>(x, v, c, acc, ld), ahead.fetch(16 * WIDTH * 32 * sizeof(T) / 128, int(d * sizeof(T)));
  for (; c < d; c += 16) add_columns<ROWS, 1>(x, v, c, acc, ld), ahead.fetch(16 * 32 * sizeof(T) / 128, int(d * sizeof(T)));
}

constexpr long padded(long d) { return (d + 31) / 32 * 32; }
constexpr size_t state_bytes(long rows, long d) { return (rows * (padded(d) + 2) + 15) / 16 * 16 * sizeof(float); }

// The two scales of each of 128 keys that are latents, [kKeys] each; without them, null.
struct TwoScales {
  const float *first = nullptr, *second = nullptr;
};

// The arithmetic of attend_rows in floats, for the rows of queries (of type Q) and 128 keys and values (of type T) of a
// KV head. Keys with two scales are multiplied by them here; other scales are left to attend_rows.
template <typename Q, typename T, bool ONE_ORDER>
class FloatTiles {
 public:
  static size_t bytes(long rows, long d, long dv) { return (rows * d + 16 + kKeys * (padded(d) + padded(dv))) * sizeof(float); }
  FloatTiles(char* memory, int rows, long d, long dv, bool two_scales) : rows_(rows), d_(d), dv_(dv), two_scales_(two_scales), k_((float*)memory), v_(k_ + kKeys * padded(d)), q_(v_ + kKeys * padded(dv)) {}

  int groups() const { return (rows_ + kMostRows - 1) / kMostRows; }
  int begin(int group) const { return int(long(rows_) * group / groups()); }
  int size(int group) const { return begin(group + 1) - begin(group); }

  template <typename F>
  void queries(F&& row) {
    if (kBytes && rows_ <= kFewRows && !two_scales_) {
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
            if constexpr (kPairs)
              if (by_pairs()) {
                score_pairs<n>((const bf16*)q_, keys_->k + b * 32, d_, x, *ahead_);
                continue;
              }
            if constexpr (kBytes) score_bytes<n>(bytes_, q, keys_->k + b * 32, d_, x, *ahead_);
            else score_few<n, ONE_ORDER ? 1 : 2>(q, keys_->k + b * 32, d_, x, *ahead_);
            continue;
          }
        for (long c = 0; c < d_; c += 32) tile_products<n, 1, n>(q + c * n, make_keys(b, c, k_), int(std::min(32L, d_ - c)), x, kKeys);
      }
    });
  }
  // Computes acc[r][padded(dv)] += x[r] times the values of 32 * steps keys.
  void add(int group, int steps, const float* x, float* acc) {
    of_rows(size(group), [&](auto n) {
      for (long c = 0; groups() > 1 && c < dv_; c += 32) tile_products<n, kKeys, 1>(x, v_ + c * kKeys, steps * 32, acc + c, padded(dv_));
      for (int b = 0; groups() == 1 && b < steps; b++, x += 32) {
        if constexpr (n <= kFewRows) add_few<n>(x, keys_->v + b * 32, dv_, acc, padded(dv_), *ahead_);
        else for (long c = 0; c < dv_; c += 32) tile_products<n, kKeys, 1>(x, make_values(b, c, v_), 32, acc + c, padded(dv_));
      }
    });
  }

 private:
  static constexpr int kFewRows = 4;
  // Products of bytes: queries of 16 bits keep their precision.
  static constexpr bool kBytes = kByteProducts && std::is_same_v<T, int8_t> && !std::is_same_v<Q, float> && !ONE_ORDER;
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

inline Ints load_words(const bf16* p) { return load_ints(p); }  // 2 * kLanes elements as words
inline Ints load_words(const int8_t* p) { return words_of_bytes(p); }
inline Ints low_words(const bf16* p) { return widen_words(p); }  // kLanes elements in the low halves of dwords
inline Ints low_words(const int8_t* p) { return widen_signed_bytes(p) & set1_ints(0xffff); }

// Packs 128 keys, as pairs of bf16 or of integers, into k-steps whose columns are keys:
// [128 / 32][d / 32][2 tiles][16 pairs of d][16 keys][2].
template <typename T>
void pair_keys(const T* const* k, long d, bf16* steps) {
  for (int j = 0; j < kKeys; j += kLanes)
    for (long c = 0; c < d; c += 2 * kLanes) {
      Ints r[kLanes];
      unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = load_words(k[j + key] + c); });
      transpose(r);
      bf16* to = steps + j / 32 * 32 * d + c / 32 * kTileStep + tile_place(j % 32) + c % 32 * 16;
      unrolled<kLanes>([&](auto p) __attribute__((always_inline)) { store_ints(to + p * 32, r[p]); });
    }
}

// Packs their values into k-steps whose columns are elements: [d / 32][128 / 32][2 tiles][16 pairs of keys][16 d][2].
template <typename T>
void pair_values(const T* const* v, long d, bf16* steps) {
  for (int j = 0; j < kKeys; j += 2)
    for (long c = 0; c < d; c += kLanes)
      store_ints(steps + c / 32 * 32 * kKeys + j / 32 * kTileStep + tile_place(c % 32) + j % 32 * 16, low_words(v[j] + c) | left<16>(low_words(v[j + 1] + c)));
}

// The arithmetic of attend_rows in fixed point. Each key is a column with its own runs; values are columns of kKeys.
// Keys and values in bytes are taken as they are: a run of 256 entries of at most 127 has a norm below 2032.
template <typename T>
class FixedTiles {
 public:
  static size_t bytes(long rows, long d, long dv) { return unit_count(d, dv) * sizeof(float) + kKeys * (d + dv) * sizeof(bf16) + wide_bytes(d, dv) + FixedRows::bytes(rows, d); }
  // With two scales, the first must be that of whole runs.
  FixedTiles(char* memory, int rows, long d, long dv, bool)
      : d_(d), dv_(dv), k_units_((float*)memory), v_units_(k_units_ + kKeys * runs_of(d / 32)), k_((bf16*)(k_units_ + unit_count(d, dv))), v_(k_ + kKeys * d), wide_(v_ + kKeys * dv),
        q_((char*)wide_ + wide_bytes(d, dv), rows, d) {
    if (std::is_same_v<T, int8_t>) std::fill(k_units_, k_units_ + unit_count(d, dv), 1.f);
  }

  int groups() const { return q_.groups(); }
  int begin(int group) const { return q_.begin(group); }
  int size(int group) const { return q_.size(group); }
  template <typename F>
  void queries(F&& row) const { q_.fill(d_, row); }
  void keys(const KeyBlock<T>& keys, int, KeyBlock<T>&, const TwoScales& scales) {
    if constexpr (std::is_same_v<T, e4m3>) {
      const bf16* rows[kKeys];
      widen(keys.k, d_, rows), pair_keys(rows, d_, k_);
      widen(keys.v, dv_, rows), pair_values(rows, dv_, v_);
    } else {
      pair_keys(keys.k, d_, k_), pair_values(keys.v, dv_, v_);
    }
    if (std::is_same_v<T, int8_t> && !scales.first) return;
    for (int b = 0; b < kKeys; b += 32)
      over_runs(b, [&](long run, bf16* tiles, int count, float* units) {
        if constexpr (std::is_same_v<T, int8_t>) std::fill(units, units + 32, 1.f);
        else fix_tiles(tiles, count, units);
        if (scales.first) scale_tile(units, run * kFixedRun, run * kFixedRun + 1, dv_, scales.first + b, scales.second + b);
      });
    if (std::is_same_v<T, int8_t>) return;
    for (long c = 0; c < dv_; c += 32) fix_tiles(v_ + c * kKeys, kKeys / 32, v_units_ + c);
  }
  void score(int group, int steps, float* x) {
    for (int b = 0; b < steps * 32; b += 32)
      over_runs(b, [&](long run, const bf16* tiles, int count, const float* units) { fixed_group(q_, group, run, (const int16_t*)tiles, count, units, none_, x + b, kKeys); });
  }
  void add(int group, int steps, const float* x, float* acc) {
    alignas(64) char memory[FixedRows::bytes(kMostRows, kKeys)];
    const FixedRows weights(memory, size(group), steps * 32);
    weights.fill(steps * 32, [&](int r) { return x + r * kKeys; });
    for (long c = 0; c < dv_; c += 32) fixed_group(weights, 0, 0, (const int16_t*)v_ + c * kKeys, steps, v_units_ + c, none_, acc + c, dv_);
  }

 private:
  static long unit_count(long d, long dv) { return kKeys * runs_of(d / 32) + dv; }
  static size_t wide_bytes(long d, long dv) { return std::is_same_v<T, e4m3> ? kKeys * std::max(d, dv) * sizeof(bf16) : 0; }
  // Converts x, 128 keys or their values, to bf16, which is exact.
  void widen(const T* const* x, long d, const bf16** rows) const {
    for (int j = 0; j < kKeys; j++) {
      bf16* to = wide_ + j * d;
      for (long c = 0; c < d; c += 16) store(to + c, load(x[j] + c));
      rows[j] = to;
    }
  }
  template <typename F>
  void over_runs(int b, F&& f) {  // calls f for each run of the 32 keys from b on
    const long steps = d_ / 32, runs = runs_of(steps);
    for (long run = 0; run < runs; run++)
      f(run, k_ + b * d_ + run * kFixedSteps * kTileStep, int(std::min(long(kFixedSteps), steps - run * kFixedSteps)), k_units_ + (b / 32 * runs + run) * 32);
  }

  long d_, dv_;
  float *k_units_, *v_units_;
  bf16 *k_, *v_;  // converted to integers in place
  bf16* wide_;    // of e4m3: keys, then values
  FixedRows q_;
  Fetch none_;
};

// Multiplies the first 32 * steps columns of x [rows][kKeys] by `by`.
inline void multiply_columns(float* x, int rows, int steps, const float* by) {
  for (int r = 0; r < rows; r++, x += kKeys)
    for (int c = 0; c < steps * 32; c += 16) store(x + c, load(x + c) * load(by + c));
}

// Runs a task of queries of type Q and a cache of type T. slots[token] is the slot of the token's partial result, unless the task has its own slot. following: the
// thread's next task, whose first keys are prefetched, or null if not known yet.
template <typename Q, typename T, typename Tiles>
void attend_rows(const Step& s, const Task& t, const Task* following, const Partials& partials, const long* slots, char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim, dv = l.v_dim, ld = padded(dv);
  const int g = s.group(), rows = t.count * g;
  float *acc = (float*)memory, *m = acc + rows * ld, *sum = m + rows;
  Tiles tiles(memory + state_bytes(rows, dv), rows, d, dv, l.two_scales());
  auto token = [&](int r) { return t.tokens[r / g]; };
  auto partial = [&](long h, int r) { return partials.at(t.slot < 0 ? slots[token(r)] : t.slot, h * g + r % g); };
  const long first = t.begin / kKeys * kKeys;
  KeyBlock<T> blocks[2], *now = &blocks[0], *next = &blocks[1];
  next->locate(l, t.table, t.h0, first, t.begin, t.end);
  for (long h = t.h0; h < t.h1; h++) {
    for (int r = 0; r < rows; r++) {
      if (t.resume) {
        const Partial from = partial(h, r);
        std::copy(from.acc, from.acc + dv, acc + r * ld);
        m[r] = *from.m, sum[r] = reduce_add(load(from.l));
      } else {
        std::fill(acc + r * ld, acc + r * ld + ld, 0.f);
        m[r] = kNegInf, sum[r] = 0;
      }
    }
    tiles.queries([&](int r) { return (const Q*)s.q + token(r) * s.ldq + (h * g + r % g) * d; });
    for (long key = first; key < t.end; key += kKeys) {
      std::swap(now, next);
      if (key + kKeys < t.end) next->locate(l, t.table, h, key + kKeys, t.begin, t.end);
      else if (h + 1 < t.h1) next->locate(l, t.table, h + 1, first, t.begin, t.end);
      else if (following) next->locate(l, following->table, following->h0, following->begin / kKeys * kKeys, following->begin, following->end);
      else next->end = 0;
      alignas(64) float k_scales[kKeys], v_scales[kKeys], rope_scales[kKeys];
      TwoScales two;
      if constexpr (kScaled<T>) {
        now->scales(l, l.k_scales, k_scales), now->scales(l, l.v_scales, v_scales);
        if (l.two_scales()) now->scales(l, l.rope_scales, rope_scales), two = {k_scales, rope_scales};
      }
      tiles.keys(*now, int(std::min((t.end - key + 31) / 32, kKeys / 32L)), *next, two);
      for (int i = 0; i < tiles.groups(); i++) {
        const int row0 = tiles.begin(i), size = tiles.size(i);
        alignas(64) float x[kMostRows * kKeys];
        // A task's tokens ascend, or all of them see all its keys.
        const long seen = std::min(t.end, s.position[token(row0 + size - 1)] + 1) - key;
        if (seen <= 0) continue;
        const int steps = int(std::min((seen + 31) / 32, kKeys / 32L));
        std::fill(x, x + size * kKeys, 0.f);
        tiles.score(i, steps, x);
        if constexpr (kScaled<T>)
          if (!two.first) multiply_columns(x, size, steps, k_scales);
        for (int r = 0; r < size; r++) {
          const long position = s.position[token(row0 + r)];
          static constexpr float (*kWeigh[])(const Layer&, float*, long, long, float&, float&) = {weigh<2>, weigh<4>, weigh<6>, weigh<8>};
          const float correction =
              kWeigh[steps - 1](l, x + r * kKeys, std::max(t.begin, s.first_key(position)) - key, std::min(t.end, position + 1) - key, m[row0 + r], sum[row0 + r]);
          if (correction == 1.f) continue;
          float* values = acc + (row0 + r) * ld;
          for (long c = 0; c < dv; c += 16) store(values + c, load(values + c) * set1(correction));
        }
        if constexpr (kScaled<T>) multiply_columns(x, size, steps, v_scales);
        tiles.add(i, steps, x, acc + row0 * ld);
      }
    }
    for (int r = 0; r < rows; r++) {
      const float* values = acc + r * ld;
      if (!t.keep) {
        write_row((Q*)s.out + token(r) * s.ldo + (h * g + r % g) * dv, values, l.with_sink(h * g + r % g, m[r], sum[r]), dv);
        continue;
      }
      const Partial to = partial(h, r);
      std::copy(values, values + dv, to.acc);
      store(to.l, zero());
      *to.l = sum[r], *to.m = m[r];
    }
  }
}

}  // namespace
