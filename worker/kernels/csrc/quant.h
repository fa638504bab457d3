// Weights of 4 or 8 bits in the order of gemm.cpp's tiles, with a scale, and perhaps an offset, per column and group of k:
//     weight = scale * q + offset          q = stored - 8 (4 bits), or a signed byte
// For each block of 32 columns and k-step of 32 there are 32 tile rows (two tiles of 16) of 16 columns x 2 k:
//     8 bits   a row is 32 bytes, in the order of the tile
//     4 bits   64 bytes hold 4 rows: bits 4i .. 4i + 3 of word j are entry j of row i
// scales, offsets: bf16 [columns / 32][groups][32].
#pragma once

#include "simd.h"

struct Quant {
  const uint8_t* data;
  const bf16* scales;
  const bf16* offsets;  // may be null
  int bits, group, groups, k_steps;

  long step_bytes() const { return bits * 128; }
  const uint8_t* step(int nb, int s) const { return data + (long(nb) * k_steps + s) * step_bytes(); }
  long group_at(int nb, int s) const { return (long(nb) * groups + long(s) * 32 / group) * 32; }
};

#if defined(__AVX512F__)

// Tile rows of one k-step as bf16, scaled: into dst[32][32].
static inline void dequantize_step(const Quant& q, int nb, int s, bf16* dst) {
  const uint8_t* src = q.step(nb, s);
  const long at = q.group_at(nb, s);
  const vf zeros = zero();
  for (int t = 0; t < 2; t++) {
    const vf scale = load(q.scales + at + t * 16), offset = q.offsets ? load(q.offsets + at + t * 16) : zeros;
    if (q.bits == 8) {  // lanes are (column, k) pairs: each column's scale twice
      const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
      const vf s0 = {_mm512_permutexvar_ps(first, scale.v)}, s1 = {_mm512_permutexvar_ps(second, scale.v)};
      const vf o0 = {_mm512_permutexvar_ps(first, offset.v)}, o1 = {_mm512_permutexvar_ps(second, offset.v)};
      for (int r = 0; r < 16; r++, src += 32, dst += 32) {
        vf a = {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)src)))};
        vf b = {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(src + 16))))};
        a = fma(a, s0, o0), b = fma(b, s1, o1);
#if defined(__AVX512BF16__)
        _mm512_storeu_si512(dst, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
#else
        store(dst, a), store(dst + 16, b);
#endif
      }
    } else {
      // A nibble, looked up, is the bf16 of nibble - 8; a dword of two of them is one column's two k.
      const uint16_t t16[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
      const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)t16));
      const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(int(0xffff0000u));
      for (int r = 0; r < 16; r += 4, src += 64) {
        __m512i x = _mm512_loadu_si512(src);
        for (int i = 0; i < 4; i++, dst += 32) {
          __m512i pair = _mm512_permutexvar_epi16(x, table);
          x = _mm512_srli_epi16(x, 4);
          vf even = {_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16))}, odd = {_mm512_castsi512_ps(_mm512_and_si512(pair, high))};
          even = fma(even, scale, offset), odd = fma(odd, scale, offset);
          __m512i e = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even.v), half), 16), o = _mm512_add_epi32(_mm512_castps_si512(odd.v), half);
          _mm512_storeu_si512(dst, _mm512_mask_blend_epi16(0xaaaaaaaau, e, o));
        }
      }
    }
  }
}

#endif

// --- few rows: 16-bit integers ------------------------------------------------------------------------------------------------------------------------

constexpr int kRun = 256;  // k that share a scale of x: 127 * 32767 * 256 still fits 32 bits

// x as 16-bit integers: x[k] ~ values[k] * scale[k / run]; sum[k / run] is their sum. Finer than bf16 for all but the smallest entries of a run.
struct QuantRows {
  int16_t* values;
  float *scale, *sum;
  long ld, runs;
  int run;
  QuantRows(char* memory, long rows, int k_steps, int run) : ld(long(k_steps) * 32), runs((ld + run - 1) / run), run(run) {
    values = (int16_t*)memory;
    scale = (float*)(values + rows * ld);
    sum = scale + rows * runs;
  }
  static size_t bytes(long rows, int k_steps, int run) { return rows * (long(k_steps) * 64 + (long(k_steps) * 32 / run + 1) * 8); }
  void fill(long row, const bf16* x, long k) {
    for (long i = 0; i < runs; i++) {
      const long begin = i * run, end = begin + run < ld ? begin + run : ld;
      float top = 0, total = 0;
      for (long j = begin; j < end && j < k; j++) top = std::fabs(to_float(x[j])) > top ? std::fabs(to_float(x[j])) : top;
      const float inverse = top > 0 ? 32767.f / top : 0.f;
      for (long j = begin; j < end; j++) {
        const float v = j < k ? to_float(x[j]) * inverse : 0.f;
        const int n = int(v + (v < 0 ? -0.5f : 0.5f));
        values[row * ld + j] = int16_t(n);
        total += float(n);
      }
      scale[row * runs + i] = top / 32767.f;
      sum[row * runs + i] = total * (top / 32767.f);
    }
  }
};

#if defined(__AVX512F__)
struct vi { __m512i v; };
static inline vi zero_int() { return {_mm512_setzero_si512()}; }
static inline vi load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static inline vi load_bytes(const uint8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
template <int N> static inline vi nibble(vi x) {
  const __m512i mask = _mm512_set1_epi16(15);
  if (N == 0) return {_mm512_and_si512(x.v, mask)};
  if (N == 3) return {_mm512_srli_epi16(x.v, 12)};
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4 * N), mask)};
}
// acc += a.even * x.low + a.odd * x.high, in each dword.
static inline vi add_products(vi acc, vi a, const int16_t* x) {
  int pair;
  memcpy(&pair, x, 4);
#if defined(__AVX512VNNI__)
  return {_mm512_dpwssd_epi32(acc.v, a.v, _mm512_set1_epi32(pair))};
#else
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, _mm512_set1_epi32(pair)))};
#endif
}
static inline vi operator+(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline vf to_vf(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
#else
struct vi { __m256i a, b; };
static inline vi zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline vi load_words(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
static inline vi load_bytes(const uint8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
template <int N> static inline vi nibble(vi x) {
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4 * N), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4 * N), mask)};
}
static inline vi add_products(vi acc, vi w, const int16_t* x) {
  int pair;
  memcpy(&pair, x, 4);
  const __m256i p = _mm256_set1_epi32(pair);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, p)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, p))};
}
static inline vi operator+(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline vf to_vf(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
#endif

// out[row][tile] = x W of ROWS rows for the 32 columns of block nb.
template <int ROWS, int BITS>
static inline void quant_block(const Quant& q, const QuantRows& x, long row0, int nb, vf (*out)[2]) {
  constexpr int CHAINS = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
  for (int r = 0; r < ROWS; r++) out[r][0] = out[r][1] = zero();
  const int run_steps = x.run / 32;
  const uint8_t* src = q.step(nb, 0);
  for (int s0 = 0; s0 < q.k_steps; s0 += run_steps) {
    const int s1 = s0 + run_steps < q.k_steps ? s0 + run_steps : q.k_steps;
    const long at = q.group_at(nb, s0);
    vi acc[2][CHAINS][ROWS];
    for (auto& tile : acc) for (auto& chain : tile) for (auto& a : chain) a = zero_int();
    for (int s = s0; s < s1; s++)
      for (int t = 0; t < 2; t++) {
        for (long i = 0; i < BITS * 64; i += 64) _mm_prefetch((const char*)src + 4096 + i, _MM_HINT_T0);
        const int16_t* xs = x.values + row0 * x.ld + long(s) * 32;
        if (BITS == 8) {
#pragma GCC unroll 16
          for (int i = 0; i < 16; i++, src += 32) {
            const vi w = load_bytes(src);
            for (int r = 0; r < ROWS; r++) acc[t][i % CHAINS][r] = add_products(acc[t][i % CHAINS][r], w, xs + r * x.ld + 2 * i);
          }
        } else {
#pragma GCC unroll 4
          for (int i = 0; i < 16; i += 4, src += 64) {
            const vi packed = load_words(src);
            const vi w[4] = {nibble<0>(packed), nibble<1>(packed), nibble<2>(packed), nibble<3>(packed)};
            for (int j = 0; j < 4; j++)
              for (int r = 0; r < ROWS; r++) acc[t][j % CHAINS][r] = add_products(acc[t][j % CHAINS][r], w[j], xs + r * x.ld + 2 * (i + j));
          }
        }
      }
    for (int t = 0; t < 2; t++) {
      const vf scale = load(q.scales + at + t * 16);
      for (int r = 0; r < ROWS; r++) {
        vi total = acc[t][0][r];
        for (int c = 1; c < CHAINS; c++) total = total + acc[t][c][r];
        const long i = (row0 + r) * x.runs + s0 / run_steps;
        vf y = to_vf(total) * set1(x.scale[i]);
        if (BITS == 4) y = y - set1(8.f * x.sum[i]);
        out[r][t] = fma(y, scale, out[r][t]);
        if (q.offsets) out[r][t] = fma(load(q.offsets + at + t * 16), set1(x.sum[i]), out[r][t]);
      }
    }
  }
}

// --- packing --------------------------------------------------------------------------------------------------------------------------------------------

// One column's values q[k] (signed) into its places. `column` is 0 .. 31 within block nb.
static inline void pack_column(uint8_t* data, int bits, int k_steps, long nb, int column, const int8_t* q) {
  for (int s = 0; s < k_steps; s++) {
    uint8_t* step = data + (nb * k_steps + s) * bits * 128;
    for (int i = 0; i < 32; i++) {
      const int row = column / 16 * 16 + i / 2, entry = column % 16 * 2 + i % 2;
      const int v = q[s * 32 + i];
      if (bits == 8) step[row * 32 + entry] = uint8_t(v);
      else {
        uint8_t& byte = step[row / 4 * 64 + entry * 2 + row % 4 / 2];
        byte = uint8_t(row % 2 ? (byte & 0x0f) | (v + 8) << 4 : (byte & 0xf0) | (v + 8));
      }
    }
  }
}

// The scale, a bf16, that quantizes w[0..n) best in the square, and the values. 4 bits try scales around the one that makes the largest entry -8 (which has
// no opposite), some of which clip it; 8 bits are fine enough without a search.
static inline float quantize_group(const float* w, int n, int bits, int8_t* q) {
  float top = 0;
  for (int i = 0; i < n; i++) if (std::fabs(w[i]) > std::fabs(top)) top = w[i];
  if (top == 0) {
    for (int i = 0; i < n; i++) q[i] = 0;
    return 0;
  }
  const float lo = bits == 8 ? -127.f : -8.f, hi = bits == 8 ? 127.f : 7.f;
  auto error_of = [&](float scale) {
    const float inverse = 1.f / scale;
    float error = 0;
    for (int i = 0; i < n; i++) {
      const float v = std::fmin(std::fmax(std::nearbyint(w[i] * inverse), lo), hi), e = w[i] - v * scale;
      error += e * e;
    }
    return error;
  };
  float best = to_float(to_bf16(bits == 8 ? std::fabs(top) / 127.f : -top / 8.f));
  if (bits == 4) {
    float least = error_of(best);
    for (int c = 0; c < 14; c++) {
      const float scale = to_float(to_bf16(-top / (6.5f + 0.25f * float(c))));
      const float error = error_of(scale);
      if (error < least) least = error, best = scale;
    }
  }
  for (int i = 0; i < n; i++) q[i] = int8_t(std::fmin(std::fmax(std::nearbyint(w[i] / best), lo), hi));
  return best;
}
