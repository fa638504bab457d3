// Vector types and functions, for AVX-512 and AVX2. Every kernel is written once against these few functions.
//
// `vf` is sixteen floats: one AVX-512 register, or two AVX2 registers without AVX-512. `load` and `store` are
// overloaded on the element type, so a template over the cache's dtype (float, bf16, f16) supports all three.
//
// `Floats` and `Ints` are one register of the instruction set, kLanes entries of 32 bits. Products (vector_tiles.h,
// fixed_tiles.h) count registers, since the number of registers limits how many sums a loop can keep. GCC's operators
// work on both types.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // sign, 4 bits of exponent, 3 of fraction; load() returns the number divided by 256

// Prefetches ahead of `line` in a stream that is read once; called for each line as it is used. The stream is fetched
// in two stages, into L2 and from there into L1: a line on its way from memory to L1 occupies one of the core's 16 fill
// buffers all the time, while for a line on its way to L2 the hardware prefetcher has usually issued the request
// already. (always_inline, because GCC otherwise takes it for a function without effect and drops it.)
__attribute__((always_inline)) static inline void read_ahead(const void* line) {
#if defined(__AVX512F__) && !defined(__AMX_TILE__)
  _mm_prefetch((const char*)line + 8192, _MM_HINT_T1);  // without the second stage: up to 1.2 x for one row (Zen 4)
#else
  _mm_prefetch((const char*)line + 6144, _MM_HINT_T1);
  _mm_prefetch((const char*)line + 1024, _MM_HINT_T0);
#endif
}

static constexpr float kNegInf = -std::numeric_limits<float>::infinity();

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline float to_float(f16 x) { return _cvtsh_ss(x.bits); }

static inline bf16 to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40)};  // NaN stays NaN
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}

static inline void store_scalar(float* p, float x) { *p = x; }
static inline void store_scalar(bf16* p, float x) { *p = to_bf16(x); }
static inline void store_scalar(f16* p, float x) { p->bits = _cvtss_sh(x, 0); }

#if defined(__AVX512F__)

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
static inline void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x); }
static inline Floats set1_floats(float x) { return _mm512_set1_ps(x); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats root(Floats x) { return _mm512_sqrt_ps(x); }
static inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
static inline void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
static inline Ints set1_ints(int x) { return _mm512_set1_epi32(x); }
static inline Ints set1_words(int x) { return _mm512_set1_epi16(short(x)); }
static inline Ints repeat(__m128i x) { return _mm512_broadcast_i32x4(x); }
static inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
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
// sum += the four products of unsigned bytes and the signed bytes of x in each lane.
static inline Ints add_byte_products(Ints sum, Ints bytes, Ints x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(x));
  return sum;
}
static inline void transpose(Ints* r) { transpose_16x16(r); }
static inline vf whole(const Floats* r) { return {r[0]}; }
static inline Floats part(vf x, int) { return x.v; }

#else

struct vf { __m256 a, b; };

static inline vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline __m256 load8(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf load(const bf16* p) { return {load8(p), load8(p + 8)}; }
static inline vf load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline vf load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline vf load(const e4m3* p) {
  __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  words = _mm256_and_si256(words, _mm256_set1_epi16(short(0xbf80)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
}
static inline void store(float* p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline void store(f16* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, 0));
}
static inline __m256i round8(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff)), 16);
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static inline void store(bf16* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(round8(x.a), round8(x.b)), 0xd8));
}
template <typename T> static inline vf rounded(vf x) {
  T t[16];
  store(t, x);
  return load(t);
}
template <> inline vf rounded<float>(vf x) { return x; }
static inline vf operator+(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline vf operator-(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline vf operator*(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline vf operator/(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline vf root(vf x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
static inline float reduce_add(vf x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float reduce_max(vf x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline vf select_range(vf x, int lo, int hi, vf other) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  auto pick = [&](__m256 a, __m256 b, __m256i lane) {
    __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane),
                                  _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(lo - 1)));
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(in));
  };
  return {pick(x.a, other.a, first), pick(x.b, other.b, second)};
}
static inline vf nearest(vf x) { return {_mm256_round_ps(x.a, 0), _mm256_round_ps(x.b, 0)}; }
static inline vf zero_below(vf x, vf least) {
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ)),
          _mm256_and_ps(x.b, _mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ))};
}
static inline bool any_nan(vf x, vf y) {
  return _mm256_movemask_ps(
             _mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q))) != 0;
}
static inline vf scaled(vf x, vf n) {
  auto power = [](__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  };
  return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
}
static inline int append_not_below(float* p, vf x, vf least) {
  float t[16], bound[16];
  store(t, x);
  store(bound, least);
  int n = 0;
  for (int i = 0; i < 16; i++) {
    p[n] = t[i];
    n += t[i] >= bound[i];
  }
  return n;
}
static inline void store_bytes(int8_t* p, vf x) {
  float t[16];
  store(t, x);
  for (int i = 0; i < 16; i++) p[i] = int8_t(t[i]);
}
static inline __m256 exp2_8(__m256 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-126.f));
  __m256 n = _mm256_round_ps(x, 0), f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(0.0013276472f), f, _mm256_set1_ps(0.0096755413f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.055507133f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.24022123f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.69314697f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  __m256i bias = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(bias));
}
static inline vf exp2(vf x) { return {exp2_8(x.a), exp2_8(x.b)}; }

using Floats = __m256;
using Ints = __m256i;
constexpr int kLanes = 8;

static inline Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
static inline void store_floats(float* p, Floats x) { _mm256_storeu_ps(p, x); }
static inline Floats set1_floats(float x) { return _mm256_set1_ps(x); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline Floats root(Floats x) { return _mm256_sqrt_ps(x); }
static inline Ints load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_ints(void* p, Ints x) { _mm256_storeu_si256((__m256i*)p, x); }
static inline Ints set1_ints(int x) { return _mm256_set1_epi32(x); }
static inline Ints set1_words(int x) { return _mm256_set1_epi16(short(x)); }
static inline Ints repeat(__m128i x) { return _mm256_broadcastsi128_si256(x); }
static inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
static inline Ints sub_words(Ints a, Ints b) { return _mm256_sub_epi16(a, b); }
static inline Ints sub_bytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
template <int N> static inline Ints left(Ints x) { return _mm256_slli_epi32(x, N); }
template <int N> static inline Ints right(Ints x) { return _mm256_srli_epi32(x, N); }
template <int N> static inline Ints signed_right(Ints x) { return _mm256_srai_epi32(x, N); }
template <int N> static inline Ints words_left(Ints x) { return _mm256_slli_epi16(x, N); }
template <int N> static inline Ints words_right(Ints x) { return _mm256_srli_epi16(x, N); }
static inline Ints shuffle_bytes(Ints x, Ints order) { return _mm256_shuffle_epi8(x, order); }
static inline Ints or_masked(Ints x, Ints y, Ints mask) { return x | (y & mask); }
static inline Ints odd_words(Ints even, Ints odd) { return _mm256_blend_epi16(even, odd, 0xaa); }
static inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
static inline Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
static inline Ints widen_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline Ints widen_signed_bytes(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
static inline Ints words_of_bytes(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
static inline Ints widen_words(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
static inline void store_words(int16_t* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(
                                       _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8));
}
static inline Ints add_products(Ints sum, Ints a, Ints b) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  asm("" : "+x"(sum));  // stops the compiler from adding products to each other first, which needs too many registers
  return sum;
}
// The sums of two neighbouring products of unsigned bytes and the signed bytes of x as words, which must not overflow.
static inline Ints word_products(Ints bytes, Ints x) { return _mm256_maddubs_epi16(bytes, x); }
static inline Ints add_words(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
// Transposes eight rows of eight dwords.
static inline void transpose(Ints* r) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2)
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++)
      r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]),
                r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
  for (int i = 0; i < 4; i++)
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20), t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  memcpy(r, t, sizeof(t));
}
static inline vf whole(const Floats* r) { return {r[0], r[1]}; }
static inline Floats part(vf x, int i) { return i ? x.b : x.a; }

#endif

// Calls f(0) .. f(N - 1), fully unrolled, so that an array indexed by the argument stays in registers.
template <typename F, int... I>
__attribute__((always_inline)) inline void unrolled(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F>
__attribute__((always_inline)) inline void unrolled(F&& f) { unrolled(f, std::make_integer_sequence<int, N>()); }

// Convert bf16 to float: the even or the odd elements of pairs.
static inline Floats evens(Ints pairs) { return (Floats)left<16>(pairs); }
static inline Floats odds(Ints pairs) { return (Floats)(pairs & set1_ints(int(0xffff0000u))); }

static inline vf exp(vf x) { return exp2(x * set1(1.44269504f)); }  // for x <= ~88

// Returns e^x within about one unit in the last place, for -87 < x <= 88; reduces the argument in two parts (Cephes'
// expf).
static inline vf exp_exact(vf x) {
  const vf n = nearest(x * set1(1.44269504f));
  const vf f = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  vf p = fma(set1(1.9875691500e-4f), f, set1(1.3981999507e-3f));
  p = fma(p, f, set1(8.3334519073e-3f));
  p = fma(p, f, set1(4.1665795894e-2f));
  p = fma(p, f, set1(1.6666665459e-1f));
  p = fma(p, f, set1(5.0000001201e-1f));
  return scaled(fma(p, f * f, f) + set1(1.f), n);
}

// tanh with an absolute error below 1e-6, enough for a soft cap.
static inline vf tanh(vf x) {
  vf e = exp(min(max(x + x, set1(-30.f)), set1(30.f)));
  return (e - set1(1.f)) / (e + set1(1.f));
}

// x / (1 + exp(-x)); the argument is clamped so that exp stays finite.
static inline vf silu(vf x) { return x / (set1(1.f) + exp(min(zero() - x, set1(87.f)))); }

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written as x times a sigmoid.
static inline vf gelu_tanh(vf x) {
  const vf twice = x * fma(x * x, set1(0.0713548163f), set1(1.59576912f));
  return x / (set1(1.f) + exp(min(zero() - twice, set1(87.f))));
}
