// Weights of 4 or 8 bits, with a scale and an optional offset per column and group of k: weight = scale * q + offset
// with q in -8 .. 7 or a signed byte. Stored as u = q + 8 or q + 128. Each block of 32 columns and step of 64 k has two
// tiles of 16 columns; a tile is 16 rows of 16 columns x 4 consecutive k, the layout of the right operand of AMX's byte
// products:
//     8 bits   a row is 64 bytes
//     4 bits   64 bytes hold two rows: the low halves of the bytes are row 2i, the high halves row 2i + 1
// scales, offsets: bf16 [columns / 32][groups][32]. A group is 32, 64, 128 or a multiple of 256 long.
//
// Activations become 16-bit integers, with one scale per run of k: finer than bf16 for all but the smallest entries of
// a run. AMX multiplies bytes, so it takes them as two planes, x = 256 hi + lo. Products and sums are exact; scales are
// applied once per run.
#pragma once

#include "amx.h"
#include "simd.h"

struct Quant {
  const uint8_t* data;
  const bf16* scales;
  const bf16* offsets;  // may be null
  int bits, group, groups, k_steps;
  int half = 0;  // scales and offsets are f16 instead of bf16

  long step_bytes() const { return bits * 256; }
  const uint8_t* step(int nb, int s) const { return data + (long(nb) * k_steps + s) * step_bytes(); }
  long group_at(int nb, int k) const { return (long(nb) * groups + k / group) * 32; }
  // Number of k that share a scale of x; 256 * 127 * 32767 still fits 32 bits
  int run() const { return group < 256 ? group : 256; }
  int zero_point() const { return bits == 4 ? 8 : 128; }
  // Sixteen scales or offsets, or one
  vf sixteen(const bf16* table, long at) const { return half ? load((const f16*)table + at) : load(table + at); }
  float one(const bf16* table, long at) const { return half ? to_float(((const f16*)table)[at]) : to_float(table[at]); }
  void put(const bf16* table, long at, float value) const {
    if (half) store_scalar((f16*)table + at, value);
    else store_scalar((bf16*)table + at, value);
  }
};

// --- activations -----------------------------------------------------------------------------------------------------

struct QuantRows {
  // Row length; row stride, not a multiple of 1 KiB, which would map a tile's rows to the same few lines of L1; runs
  // per row
  long width, ld, runs;
  int run;
  int16_t* values;  // every four values in the order 0, 2, 1, 3; AMX uses hi and lo instead
  int8_t *hi, *lo;
  float* scale;  // [row][run], as is `sum`
  int32_t* sum;
  static constexpr float kTop = 32639;  // 127 * 256 + 127
  QuantRows(char* memory, long rows, const Quant& q) : width(long(q.k_steps) * 64), ld(width + 64), runs((width + q.run() - 1) / q.run()), run(q.run()) {
    values = (int16_t*)memory;
    hi = (int8_t*)memory;
    lo = hi + rows * ld;
    scale = (float*)(memory + 2 * rows * ld);
    sum = (int32_t*)(scale + rows * runs);
  }
  static size_t bytes(long rows, const Quant& q) { return rows * (long(q.k_steps + 1) * 128 + (long(q.k_steps) * 64 / q.run() + 1) * 8); }

  int value(long row, long k) const { return values[row * ld + k / 4 * 4 + k % 4 / 2 + k % 2 * 2]; }

  // Quantizes row x; if x is null, writes zeros. planes: write hi and lo instead of values.
  void fill(long row, const bf16* x, long k, bool planes) {
    if (!x) k = 0;
    for (long i = 0; i < runs; i++) {
      const long begin = i * run, end = begin + run < width ? begin + run : width, full = begin < k ? begin + ((end < k ? end : k) - begin) / 16 * 16 : begin;
      vf tops = zero();
      long j = begin;
      for (; j < full; j += 16) tops = max(tops, max(load(x + j), zero() - load(x + j)));
      float top = reduce_max(tops);
      for (; j < end && j < k; j++) top = std::fmax(top, std::fabs(to_float(x[j])));
      const float inverse = top > 1e-30f ? kTop / top : 0.f;
      int total = 0;
      j = begin;
#if defined(__AVX512F__)
      const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0);
      __m512i totals = _mm512_setzero_si512();
      for (; j < full; j += 16) {
        const __m512i n = _mm512_cvtps_epi32((load(x + j) * set1(inverse)).v);
        totals = _mm512_add_epi32(totals, n);
        if (planes) {
          _mm_storeu_si128((__m128i*)(lo + row * ld + j), _mm512_cvtepi32_epi8(n));
          _mm_storeu_si128((__m128i*)(hi + row * ld + j), _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8)));
        } else {
          _mm256_storeu_si256((__m256i*)(values + row * ld + j), _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, n)));
        }
      }
      total = _mm512_reduce_add_epi32(totals);
#else
      __m256i totals = _mm256_setzero_si256();
      for (; j < full; j += 16) {
        const vf scaled = load(x + j) * set1(inverse);
        const __m256i a = _mm256_cvtps_epi32(scaled.a), b = _mm256_cvtps_epi32(scaled.b), n = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        totals = _mm256_add_epi32(totals, _mm256_add_epi32(a, b));
        _mm256_storeu_si256((__m256i*)(values + row * ld + j), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(n, 0xd8), 0xd8));
      }
      for (int i = 0; i < 8; i++) total += ((const int32_t*)&totals)[i];
#endif
      for (; j < end; j++) {
        const int n = j < k ? int(std::lrint(to_float(x[j]) * inverse)) : 0;
        if (planes) lo[row * ld + j] = int8_t(n), hi[row * ld + j] = int8_t((n + 128) >> 8);
        else values[row * ld + j / 4 * 4 + j % 4 / 2 + j % 2 * 2] = int16_t(n);
        total += n;
      }
      scale[row * runs + i] = top / kTop;
      sum[row * runs + i] = total;
    }
  }
};

// --- AMX -------------------------------------------------------------------------------------------------------------

#if QUIRE_AMX && defined(__AVX512BF16__)

// Expands a tile of 4-bit weights to bytes.
static inline void expand_tile(const uint8_t* src, uint8_t* dst) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int i = 0; i < 8; i++, src += 64, dst += 128) {
    const __m512i x = _mm512_loadu_si512(src);
    _mm512_storeu_si512(dst, _mm512_and_si512(x, low));
    _mm512_storeu_si512(dst + 64, _mm512_and_si512(_mm512_srli_epi16(x, 4), low));
  }
}

// Converts a tile of bytes to scaled bf16, written to rows 0..15 of the same tile position in two consecutive bf16
// k-steps (gemm.cpp), which are 1024 entries apart.
static inline void dequantize_tile(const uint8_t* src, vf scale, vf offset, bf16* dst) {
  // Repeats each column's scale four times
  const __m512i lanes = _mm512_srli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 2);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  vf s[4], o[4];
  for (int c = 0; c < 4; c++) {
    const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(4 * c));
    s[c] = {_mm512_permutexvar_ps(at, scale.v)}, o[c] = {_mm512_permutexvar_ps(at, offset.v)};
  }
  for (int r = 0; r < 16; r++, src += 64) {
    vf v[4];
    for (int c = 0; c < 4; c++) v[c] = fma({_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(src + 16 * c))))}, s[c], o[c]);
    const __m512i a = (__m512i)_mm512_cvtne2ps_pbh(v[1].v, v[0].v), b = (__m512i)_mm512_cvtne2ps_pbh(v[3].v, v[2].v);
    bf16* at = dst + r / 8 * 1024 + r % 8 * 64;
    _mm512_storeu_si512(at, _mm512_permutex2var_epi32(a, even, b));
    _mm512_storeu_si512(at + 32, _mm512_permutex2var_epi32(a, odd, b));
  }
}

// Dequantizes tile t of step s (64 k) of block nb to its places in two bf16 k-steps [2][2 tiles][16][32].
static inline void dequantize_half(const Quant& q, int nb, int s, int t, bf16* dst) {
  alignas(64) uint8_t bytes[1024];
  const uint8_t* src = q.step(nb, s) + t * q.step_bytes() / 2;
  if (q.bits == 4) expand_tile(src, bytes), src = bytes;
  for (int half = 0; half < (q.group == 32 ? 2 : 1); half++) {  // the second group of 32 overwrites the second half
    const long at = q.group_at(nb, s * 64 + half * 32) + t * 16;
    const vf scale = q.sixteen(q.scales, at), shift = scale * set1(-float(q.zero_point())), offset = q.offsets ? shift + q.sixteen(q.offsets, at) : shift;
    alignas(64) bf16 both[2][1024];
    if (q.group != 32) dequantize_tile(src, scale, offset, dst + t * 512);
    else {
      dequantize_tile(src, scale, offset, both[0]);
      memcpy(dst + half * 1024 + t * 512, both[half], 1024);
    }
  }
}

// The sums of one run for 16 rows or fewer: planes hi and lo of tile 0, then of tile 1.
struct QuantSums {
  alignas(64) int32_t c[4][16][16];
  int k = -1, row = 0;  // start of the run, -1 if there is none; first row
};

// y += scales * sums, for up to `rows` rows of x from row0 + sums.row on.
static inline void add_quant_sums(const Quant& q, const QuantRows& x, const QuantSums& sums, int row0, int rows, int nb, float (*y)[32]) {
  if (sums.k < 0) return;
  const long at = q.group_at(nb, sums.k);
  const vf s0 = q.sixteen(q.scales, at), s1 = q.sixteen(q.scales, at + 16);
  const vf o0 = q.offsets ? q.sixteen(q.offsets, at) : zero(), o1 = q.offsets ? q.sixteen(q.offsets, at + 16) : zero();
  for (int r = 0; r < 16 && sums.row + r < rows; r++) {
    const long i = (row0 + sums.row + r) * x.runs + sums.k / x.run;
    float* out = y[sums.row + r];
    const vf sx = set1(x.scale[i]);
    const __m512i zeros = _mm512_set1_epi32(q.zero_point() * x.sum[i]);
    auto whole = [&](int t) -> vf {  // (256 hi + lo) (u - zero point)
      return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums.c[t][r]), 8), _mm512_load_si512(sums.c[t + 1][r])), zeros))};
    };
    vf a = fma(whole(0) * sx, s0, load(out)), b = fma(whole(2) * sx, s1, load(out + 16));
    if (q.offsets) a = fma(o0 * sx, set1(float(x.sum[i])), a), b = fma(o1 * sx, set1(float(x.sum[i])), b);
    store(out, a), store(out + 16, b);
  }
}

// y[rows][32] = rows of x from row0 on times block nb (32 columns), from the planes of x. A run's sums are scaled while
// AMX computes those of the next run, since the data of a tile store can be read only some time later.
static inline void amx_quant_block(const Quant& q, const QuantRows& x, int row0, int rows, int nb, float (*y)[32]) {
  alignas(64) uint8_t bytes[4][2][1024];
  QuantSums sums[2];
  int current = 0;
  for (int r = 0; r < rows; r++) store(y[r], zero()), store(y[r] + 16, zero());
  const int step = q.group < 64 ? q.group : 64, k_end = q.k_steps * 64;
  const uint8_t* base = q.step(nb, 0);
  for (int k0 = 0; k0 < k_end; k0 += q.run()) {
    const int k1 = k0 + q.run() < k_end ? k0 + q.run() : k_end;
    if (k0 % 64 == 0) {
      const uint8_t* src = base + k0 / 64 * q.step_bytes();
      for (long i = 0, n = long(k1 - k0 + 63) / 64 * q.step_bytes(); i < n; i += 64) read_ahead(src + i);
      if (q.bits == 4)
        for (int s = 0; s < (k1 - k0 + 63) / 64; s++, src += 1024) expand_tile(src, bytes[s][0]), expand_tile(src + 512, bytes[s][1]);
    }
    for (int r0 = 0; r0 < rows; r0 += 16) {
      TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      for (int k = k0; k < k1; k += step) {
        const uint8_t* b = q.bits == 4 ? bytes[(k - k0 / 64 * 64) / 64][0] : base + k / 64 * 2048;
        b += k % 64 * 16;
        TILE_LOAD(4, x.hi + (row0 + r0) * x.ld + k, x.ld);
        TILE_LOAD(6, b, 64);
        TILE_DP_SU(0, 4, 6);
        TILE_LOAD(5, x.lo + (row0 + r0) * x.ld + k, x.ld);
        TILE_DP_SU(1, 5, 6);
        TILE_LOAD(7, b + 1024, 64);
        TILE_DP_SU(2, 4, 7);
        TILE_DP_SU(3, 5, 7);
      }
      QuantSums& mine = sums[current];
      add_quant_sums(q, x, sums[current ^ 1], row0, rows, nb, y);
      TILE_STORE(0, mine.c[0], 64); TILE_STORE(1, mine.c[1], 64); TILE_STORE(2, mine.c[2], 64); TILE_STORE(3, mine.c[3], 64);
      mine.k = k0, mine.row = r0;
      sums[current ^ 1].k = -1;
      current ^= 1;
    }
  }
  add_quant_sums(q, x, sums[current ^ 1], row0, rows, nb, y);
}
#endif

// --- packing ---------------------------------------------------------------------------------------------------------

// Returns the byte index of entry k of column `column` (0 .. 31) of block nb; for 4 bits `shift` is set to its bit
// offset.
static inline long quant_place(int bits, int k_steps, long nb, int column, int k, int& shift) {
  const int row = k % 64 / 4, entry = column % 16 * 4 + k % 4;
  const long step = (nb * k_steps + k / 64) * bits * 256;
  shift = bits == 4 ? row % 2 * 4 : 0;
  return step + column / 16 * bits * 128 + (bits == 4 ? row / 2 : row) * 64 + entry;
}

// Packs the values q[16][64 k_steps] (signed) of sixteen columns into tile t of every step of block nb.
static inline void pack_columns(uint8_t* data, int bits, int k_steps, long nb, int t, const int8_t* q) {
  const long ld = long(k_steps) * 64;
  for (int s = 0; s < k_steps; s++) {
    uint8_t* dst = data + (nb * k_steps + s) * bits * 256 + t * bits * 128;
    alignas(64) uint8_t rows[16][64];
#if defined(__AVX512F__)
    __m512i r[16];
    for (int c = 0; c < 16; c++) r[c] = _mm512_loadu_si512(q + c * ld + s * 64);
    transpose_16x16(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(rows[i], r[i]);
#else
    for (int i = 0; i < 16; i++) for (int c = 0; c < 16; c++) memcpy(rows[i] + c * 4, q + c * ld + s * 64 + i * 4, 4);
#endif
    if (bits == 8)
      for (int i = 0; i < 16; i++) for (int j = 0; j < 64; j++) dst[i * 64 + j] = uint8_t(rows[i][j] ^ 0x80);
    else
      for (int i = 0; i < 16; i += 2) for (int j = 0; j < 64; j++) dst[i * 32 + j] = uint8_t(((rows[i][j] + 8) & 15) | (rows[i + 1][j] + 8) << 4);
  }
}

static inline float quant_value(const Quant& q, long row, int k) {
  int shift;
  const long nb = row / 32, at = q.group_at(int(nb), k) + row % 32;
  const uint8_t byte = q.data[quant_place(q.bits, q.k_steps, nb, int(row % 32), k, shift)];
  const int v = (q.bits == 8 ? byte : byte >> shift & 15) - q.zero_point();
  return float(v) * q.one(q.scales, at) + (q.offsets ? q.one(q.offsets, at) : 0.f);
}

// Returns the scale, a bf16 value, that quantizes w[0..n) with the least squared error, and writes the values to q. For
// 4 bits it tries scales around the one that maps the largest entry to -8 (which has no opposite), some of which clip
// that entry; 8 bits are fine enough without a search.
static inline float quantize_group(const float* w, int n, int bits, int8_t* q) {
  vf tops = zero();
  for (int i = 0; i < n; i += 16) tops = max(tops, max(load(w + i), zero() - load(w + i)));
  const float size = reduce_max(tops);
  int first = 0;  // first entry of that size; its sign matters
  while (std::fabs(w[first]) < size) first++;
  const float top = w[first];
  float best = 0;
  const vf lo = set1(bits == 8 ? -127.f : -8.f), hi = set1(bits == 8 ? 127.f : 7.f);
  auto rounded_to = [&](vf quotient) { return min(max(nearest(quotient), lo), hi); };
  if (std::fabs(top) >= 1e-30f) {
    best = to_float(to_bf16(bits == 8 ? std::fabs(top) / 127.f : -top / 8.f));
    auto error_of = [&](float scale) {
      vf sum = zero();
      for (int i = 0; i < n; i += 16) {
        const vf e = load(w + i) - rounded_to(load(w + i) * set1(1.f / scale)) * set1(scale);
        sum = fma(e, e, sum);
      }
      return reduce_add(sum);
    };
    float fewest = bits == 4 ? error_of(best) : 0.f;
    for (int c = 0; bits == 4 && c < 14; c++) {
      const float scale = to_float(to_bf16(-top / (6.5f + 0.25f * float(c)))), error = error_of(scale);
      if (error < fewest) fewest = error, best = scale;
    }
  }
  for (int i = 0; i < n; i += 16) store_bytes(q + i, best == 0 ? zero() : rounded_to(load(w + i) / set1(best)));
  return best;
}
