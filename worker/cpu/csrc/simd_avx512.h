// The functions of simd.h with AVX-512.
#pragma once

struct vf { __m512 v; };

static inline vf zero() { return {_mm512_setzero_ps()}; }
static inline vf set1(float x) { return {_mm512_set1_ps(x)}; }
static inline vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline vf load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline vf load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline vf load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// As float16, whose exponents are larger by 8, the bits are the number divided by 2^8.
static inline vf load(const e4m3* p) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(short(0xbf80))))};
}
static inline void store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
static inline void store(f16* p, vf a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, 0)); }
#if defined(__AVX512BF16__)
static inline void store(bf16* p, vf a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
static inline void store(bf16* p, vf a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff)), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
}
#endif
// Rounds x to the precision of T.
template <typename T> static inline vf rounded(vf x) {
  T t[16];
  store(t, x);
  return load(t);
}
template <> inline vf rounded<float>(vf x) { return x; }
template <> inline vf rounded<f16>(vf x) { return {_mm512_cvtph_ps(_mm512_cvtps_ph(x.v, 0))}; }
#if defined(__AVX512BF16__)
template <>
inline vf rounded<bf16>(vf x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v)), 16))};
}
#endif
static inline vf operator+(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline vf operator-(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline vf operator*(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline vf operator/(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline vf root(vf a) { return {_mm512_sqrt_ps(a.v)}; }
static inline float reduce_add(vf a) { return _mm512_reduce_add_ps(a.v); }
static inline float reduce_max(vf a) { return _mm512_reduce_max_ps(a.v); }
// Returns lanes lo <= lane < hi of a, and `other` in the remaining lanes.
static inline vf select_range(vf a, int lo, int hi, vf other) {
  uint32_t m = hi <= 0 ? 0u : hi >= 16 ? 0xffffu : (1u << hi) - 1;
  m &= lo <= 0 ? 0xffffu : lo >= 16 ? 0u : ~((1u << lo) - 1);
  return {_mm512_mask_mov_ps(other.v, (__mmask16)m, a.v)};
}
static inline vf nearest(vf x) { return {_mm512_roundscale_ps(x.v, 0)}; }
static inline vf zero_below(vf x, vf least) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ), x.v)};
}
static inline bool any_nan(vf x, vf y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_UNORD_Q) != 0; }
// Returns x * 2^n for integer n; the result must be a normal number.
static inline vf scaled(vf x, vf n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Appends the lanes of x that are not below `least` to p, which has room for 16; returns their number.
static inline int append_not_below(float* p, vf x, vf least) {
  const __mmask16 mask = _mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ);
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(mask, x.v));
  return __builtin_popcount(mask);
}
static inline void store_bytes(int8_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// Returns 2^x for x <= 0 and -inf, with a relative error below 4e-7.
static inline vf exp2(vf x) {
  x = max(x, set1(-150.f));  // scalef handles -inf, but -inf - -inf below gives NaN
  __m512 n = _mm512_roundscale_ps(x.v, 0);
  vf f = {_mm512_sub_ps(x.v, n)};
  vf p = fma(set1(0.0013276472f), f, set1(0.0096755413f));
  p = fma(p, f, set1(0.055507133f));
  p = fma(p, f, set1(0.24022123f));
  p = fma(p, f, set1(0.69314697f));
  p = fma(p, f, set1(1.0f));
  return {_mm512_scalef_ps(p.v, n)};
}
// Returns 2^x for finite x <= 0 with a relative error of 1e-4, for values that become bf16.
static inline vf exp2_coarse(vf x) {
  __m512 n = _mm512_roundscale_ps(x.v, 0);
  vf f = {_mm512_sub_ps(x.v, n)};
  vf p = fma(set1(0.055171669f), f, set1(0.24260935f));
  p = fma(p, f, set1(0.69326099f));
  p = fma(p, f, set1(0.99992806f));
  return {_mm512_scalef_ps(p.v, n)};
}

// Transposes 16 rows of 16 dwords: row r of the result holds dword r of every row.
static inline void transpose_16x16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

using Floats = __m512;
using Ints = __m512i;
constexpr int kLanes = 16;

static inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
static inline Floats load_floats(const bf16* p) { return load(p).v; }
static inline Floats load_floats(const f16* p) { return load(p).v; }
static inline void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x); }
static inline Floats set1_floats(float x) { return _mm512_set1_ps(x); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats max_floats(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats root(Floats x) { return _mm512_sqrt_ps(x); }
static inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
static inline void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
static inline Ints set1_ints(int x) { return _mm512_set1_epi32(x); }
static inline Ints set1_words(int x) { return _mm512_set1_epi16(short(x)); }
static inline Ints repeat(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
static inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
static inline Ints max_ints(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
static inline Ints sub_words(Ints a, Ints b) { return _mm512_sub_epi16(a, b); }
static inline Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
template <int N> static inline Ints left(Ints x) { return _mm512_slli_epi32(x, N); }
template <int N> static inline Ints right(Ints x) { return _mm512_srli_epi32(x, N); }
template <int N> static inline Ints signed_right(Ints x) { return _mm512_srai_epi32(x, N); }
template <int N> static inline Ints words_left(Ints x) { return _mm512_slli_epi16(x, N); }
template <int N> static inline Ints words_right(Ints x) { return _mm512_srli_epi16(x, N); }
static inline Ints shuffle_bytes(Ints x, Ints order) { return _mm512_shuffle_epi8(x, order); }
// Returns x | y & mask
static inline Ints or_masked(Ints x, Ints y, Ints mask) { return _mm512_ternarylogic_epi32(y, mask, x, 0xea); }
// Odd words of `odd`, even words of `even`
static inline Ints odd_words(Ints even, Ints odd) { return _mm512_mask_blend_epi16(0xaaaaaaaau, even, odd); }
static inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
static inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
static inline Ints truncated(Floats x) { return _mm512_cvttps_epi32(x); }
static inline Ints widen_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
static inline Ints widen_signed_bytes(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
// Returns 2 * kLanes bytes as words
static inline Ints words_of_bytes(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
static inline Ints widen_words(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store_words(int16_t* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
// sum += the two products of 16-bit integers in each lane. Uses asm because with the intrinsic GCC 12 copies the sums
// and stores them in each loop iteration.
static inline Ints add_products(Ints sum, Ints a, Ints b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#define QUIRE_BYTE_PRODUCTS 1
constexpr bool kSignedBytes = false;
// sum += the four products of unsigned bytes and the signed bytes of x in each lane.
static inline Ints add_byte_products(Ints sum, Ints bytes, Ints x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(x));
  return sum;
}
// Stores each four of sixteen integers as two dwords: their high and low bytes, 256 * high + low.
static inline void store_two_dwords(int32_t* p, vf x) {
  const __m512i n = _mm512_cvtps_epi32(x.v);
  const __m128i low = _mm512_cvtepi32_epi8(n),
                high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8));
  _mm_storeu_si128((__m128i*)p, _mm_unpacklo_epi32(high, low));
  _mm_storeu_si128((__m128i*)(p + 4), _mm_unpackhi_epi32(high, low));
}
static inline void transpose(Ints* r) { transpose_16x16(r); }
static inline vf whole(const Floats* r) { return {r[0]}; }
static inline Floats part(vf x, int) { return x.v; }
// Whether one instruction multiplies twice as many words as floats
constexpr bool kFastWords = true;
// Whether products of pairs of bf16, as they are stored, are faster than those of floats
constexpr bool kPairDots = false;
