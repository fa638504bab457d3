// The functions of simd.h with AVX2.
#pragma once

struct vf { __m256 a, b; };

static inline vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline __m256 load_floats(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline __m256 load_floats(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline vf load(const bf16* p) { return {load_floats(p), load_floats(p + 8)}; }
static inline vf load(const f16* p) { return {load_floats(p), load_floats(p + 8)}; }
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
static inline Floats max_floats(Floats a, Floats b) { return _mm256_max_ps(a, b); }
static inline Floats root(Floats x) { return _mm256_sqrt_ps(x); }
static inline Ints load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_ints(void* p, Ints x) { _mm256_storeu_si256((__m256i*)p, x); }
static inline Ints set1_ints(int x) { return _mm256_set1_epi32(x); }
static inline Ints set1_words(int x) { return _mm256_set1_epi16(short(x)); }
static inline Ints repeat(const void* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
static inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
static inline Ints max_ints(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
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
static inline Ints truncated(Floats x) { return _mm256_cvttps_epi32(x); }
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
// sum += the four products of codes below 64 and the signed bytes of x[i * stride] in each lane, of N registers of
// codes. The sums of N pairs of products must fit 16 bits.
template <int N>
__attribute__((always_inline)) static inline Ints add_small_products(Ints sum, const Ints* codes, const int32_t* x,
                                                                     long stride) {
  Ints words = _mm256_maddubs_epi16(codes[0], set1_ints(x[0]));
  for (int i = 1; i < N; i++)
    words = _mm256_add_epi16(words, _mm256_maddubs_epi16(codes[i], set1_ints(x[i * stride])));
  return add_products(sum, words, set1_words(1));
}
// p[i] = the sum of register i's entries times `unit`.
static inline void store_totals(float* p, const Ints* four, float unit) {
  const Ints sums = _mm256_hadd_epi32(_mm256_hadd_epi32(four[0], four[1]), _mm256_hadd_epi32(four[2], four[3]));
  const __m128i totals = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  _mm_storeu_ps(p, _mm_mul_ps(_mm_cvtepi32_ps(totals), _mm_set1_ps(unit)));
}
#define QUIRE_BYTE_PRODUCTS 0
constexpr bool kSignedBytes = false;
// Stores each four of sixteen integers as two dwords: the words 0, 2, 1, 3.
static inline void store_two_dwords(int32_t* p, vf x) {
  const __m256i n = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
  _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(n, 0xd8), 0xd8));
}
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
// Whether one instruction multiplies twice as many words as floats
constexpr bool kFastWords = true;
// Whether products of pairs of bf16, as they are stored, are faster than those of floats
constexpr bool kPairDots = false;
