// Products with quantized weights on AMX, which multiplies bytes: activations are 16-bit integers with one scale per
// span of k, in two planes, x = 256 high + low. Products and sums are exact; scales are applied once per span. This is
// for few rows, and kinds with a table of 16-bit scales; for more rows weights are expanded to bf16.
#pragma once

#include "amx.h"
#include "quant.h"

#if QUIRE_AMX && defined(__AVX512BF16__)

struct QuantRows {
  // Row length; row stride, not a multiple of 1 KiB, which would map a tile's rows to the same few lines of L1; spans
  // per row
  long width, ld, runs;
  int run;
  int8_t *hi, *lo;
  float* scale;  // [row][span], as is `sum`
  int32_t* sum;
  static constexpr float kTop = 32639;  // 127 * 256 + 127
  QuantRows(char* memory, long rows, const Quant& q)
      : width(long(q.k_steps) * 64), ld(width + 64), runs((width + q.span() - 1) / q.span()), run(q.span()) {
    hi = (int8_t*)memory;
    lo = hi + rows * ld;
    scale = (float*)(memory + 2 * rows * ld);
    sum = (int32_t*)(scale + rows * runs);
  }
  static size_t bytes(long rows, const Quant& q) {
    return rows * (long(q.k_steps + 1) * 128 + (long(q.k_steps) * 64 / q.span() + 1) * 8);
  }

  // Quantizes row x; if x is null, writes zeros.
  void fill(long row, const bf16* x, long k) {
    if (!x) k = 0;
    for (long i = 0; i < runs; i++) {
      const long begin = i * run, end = begin + run < width ? begin + run : width,
                 full = begin < k ? begin + ((end < k ? end : k) - begin) / 16 * 16 : begin;
      vf tops = zero();
      long j = begin;
      for (; j < full; j += 16) tops = max(tops, max(load(x + j), zero() - load(x + j)));
      float top = reduce_max(tops);
      for (; j < end && j < k; j++) top = std::fmax(top, std::fabs(to_float(x[j])));
      const float inverse = top > 1e-30f ? kTop / top : 0.f;
      j = begin;
      __m512i totals = _mm512_setzero_si512();
      for (; j < full; j += 16) {
        const __m512i n = _mm512_cvtps_epi32((load(x + j) * set1(inverse)).v);
        totals = _mm512_add_epi32(totals, n);
        _mm_storeu_si128((__m128i*)(lo + row * ld + j), _mm512_cvtepi32_epi8(n));
        _mm_storeu_si128((__m128i*)(hi + row * ld + j),
                         _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8)));
      }
      int total = _mm512_reduce_add_epi32(totals);
      for (; j < end; j++) {
        const int n = j < k ? int(std::lrint(to_float(x[j]) * inverse)) : 0;
        lo[row * ld + j] = int8_t(n), hi[row * ld + j] = int8_t((n + 128) >> 8);
        total += n;
      }
      scale[row * runs + i] = top / kTop;
      sum[row * runs + i] = total;
    }
  }
};

// Expands the codes of tile t of step s (64 k) of block nb to bytes.
static inline void expand_tile(const Quant& q, int nb, int s, int t, uint8_t (*to)[64]) {
  of_kind(q.kind, [&](auto kind) {
    for (int k = 0; k < 64; k += 32) {
      const uint8_t* at = codes_at(q, nb, s * 64 + k, t * 16);
      codes_of<kind>(at, 0, [&](int i, Ints codes) { store_ints(to[k / 4 + i], codes); });
      codes_of<kind>(at, 1, [&](int i, Ints codes) { store_ints(to[k / 4 + 4 + i], codes); });
    }
  });
}

// Converts rows first .. end - 1 of a tile of bytes to scaled bf16, written to the same tile position in two
// consecutive bf16 k-steps (gemm.cpp), which are 1024 entries apart.
template <bool FLOATS>
static inline void dequantize_tile(const uint8_t* src, int first, int end, vf scale, vf offset, bf16* dst) {
  // Repeats each column's scale four times
  const __m512i lanes = _mm512_srli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 2);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
                odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  vf s[4], o[4];
  for (int c = 0; c < 4; c++) {
    const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(4 * c));
    s[c] = {_mm512_permutexvar_ps(at, scale.v)}, o[c] = {_mm512_permutexvar_ps(at, offset.v)};
  }
  for (int r = first; r < end; r++) {
    vf v[4];
    for (int c = 0; c < 4; c++) {
      const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(src + 64 * r + 16 * c)));
      v[c] = fma({FLOATS ? widen_e4m3<0>(codes) : _mm512_cvtepi32_ps(codes)}, s[c], o[c]);
    }
    const __m512i a = (__m512i)_mm512_cvtne2ps_pbh(v[1].v, v[0].v), b = (__m512i)_mm512_cvtne2ps_pbh(v[3].v, v[2].v);
    bf16* at = dst + r / 8 * 1024 + r % 8 * 64;
    _mm512_storeu_si512(at, _mm512_permutex2var_epi32(a, even, b));
    _mm512_storeu_si512(at + 32, _mm512_permutex2var_epi32(a, odd, b));
  }
}

// Dequantizes tile t of step s (64 k) of block nb to its places in two bf16 k-steps [2][2 tiles][16][32].
static inline void dequantize_half(const Quant& q, int nb, int s, int t, bf16* dst) {
  alignas(64) uint8_t bytes[16][64];
  expand_tile(q, nb, s, t, bytes);
  const int rows = (q.group < 64 ? q.group : 64) / 4;
  for (int row = 0; row < 16; row += rows) {
    const GroupNumbers numbers = numbers_of(q, nb, s * 64 + row * 4, t);
    const auto tile = q.kind == kFloats8 ? dequantize_tile<true> : dequantize_tile<false>;
    tile(bytes[0], row, row + rows, numbers.scale, fma(numbers.scale, set1(-float(q.zero_point())), numbers.offset),
         dst + t * 512);
  }
}

// The sums of one run for 16 rows or fewer: planes hi and lo of tile 0, then of tile 1.
struct QuantSums {
  alignas(64) int32_t c[4][16][16];
  int k = -1, row = 0;  // start of the run, -1 if there is none; first row
};

// y += scales * sums, for up to `rows` rows of x from row0 + sums.row on.
static inline void add_quant_sums(const Quant& q, const QuantRows& x, const QuantSums& sums, int row0, int rows, int nb,
                                  float (*y)[32]) {
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
      return {_mm512_cvtepi32_ps(_mm512_sub_epi32(
          _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums.c[t][r]), 8), _mm512_load_si512(sums.c[t + 1][r])),
          zeros))};
    };
    vf a = fma(whole(0) * sx, s0, load(out)), b = fma(whole(2) * sx, s1, load(out + 16));
    if (q.offsets) a = fma(o0 * sx, set1(float(x.sum[i])), a), b = fma(o1 * sx, set1(float(x.sum[i])), b);
    store(out, a), store(out + 16, b);
  }
}

// y[rows][32] = rows of x from row0 on times block nb (32 columns), from the planes of x. A run's sums are scaled while
// AMX computes those of the next run, since the data of a tile store can be read only some time later.
static inline void amx_quant_block(const Quant& q, const QuantRows& x, int row0, int rows, int nb, float (*y)[32]) {
  alignas(64) uint8_t bytes[4][2][16][64];
  QuantSums sums[2];
  int current = 0;
  for (int r = 0; r < rows; r++) store(y[r], zero()), store(y[r] + 16, zero());
  const int step = q.group < 64 ? q.group : 64, k_end = q.k_steps * 64;
  const uint8_t* base = q.step(nb, 0);
  for (int k0 = 0; k0 < k_end; k0 += q.span()) {
    const int k1 = k0 + q.span() < k_end ? k0 + q.span() : k_end;
    if (k0 % 64 == 0) {
      const uint8_t* src = base + k0 / 64 * q.step_bytes();
      for (long i = 0, n = long(k1 - k0 + 63) / 64 * q.step_bytes(); i < n; i += 64) read_ahead(src + i);
      if (q.bits() != 8)
        for (int s = 0; s < (k1 - k0 + 63) / 64; s++)
          expand_tile(q, nb, k0 / 64 + s, 0, bytes[s][0]), expand_tile(q, nb, k0 / 64 + s, 1, bytes[s][1]);
    }
    for (int r0 = 0; r0 < rows; r0 += 16) {
      TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      for (int k = k0; k < k1; k += step) {
        const uint8_t* b = q.bits() != 8 ? bytes[(k - k0 / 64 * 64) / 64][0][0] : base + k / 64 * 2048;
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
      TILE_STORE(0, mine.c[0], 64);
      TILE_STORE(1, mine.c[1], 64);
      TILE_STORE(2, mine.c[2], 64);
      TILE_STORE(3, mine.c[3], 64);
      mine.k = k0, mine.row = r0;
      sums[current ^ 1].k = -1;
      current ^= 1;
    }
  }
  add_quant_sums(q, x, sums[current ^ 1], row0, rows, nb, y);
}
#endif
