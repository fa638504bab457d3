// What the kernels use of AVX-512 and AMX, computed with AVX2: for tests of those paths on CPUs that lack them.
//
// Included ahead of each source, in whose text `_mm512_` has become `emulated_` and AMX's assembly calls of the
// functions at the end (see __init__.py). Semantics are those of Intel's Software Developer's Manual, volume 2; of bf16
// products, that denormals count as zeros, too. A misaligned address traps where the instruction would.
#pragma once

#include <immintrin.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512VNNI__ 1
#ifdef EMULATE_BF16
#define __AVX512BF16__ 1
#endif
#ifdef EMULATE_AMX
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define syscall(...) 0  // Linux permits everything
#endif

#define EMULATED static inline __attribute__((always_inline))

template <typename To, typename From> EMULATED To emulated_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// --- what AVX2 does with half a register
// ----------------------------------------------------------------------------------------------------

EMULATED __m256 emulated_half(__m512 x, int h) {
  return h ? __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)
           : __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
}
EMULATED __m256i emulated_half(__m512i x, int h) {
  return h ? __builtin_shufflevector(x, x, 4, 5, 6, 7) : __builtin_shufflevector(x, x, 0, 1, 2, 3);
}
EMULATED __m256d emulated_half(__m512d x, int h) {
  return h ? __builtin_shufflevector(x, x, 4, 5, 6, 7) : __builtin_shufflevector(x, x, 0, 1, 2, 3);
}
EMULATED int emulated_half(int x, int) { return x; }
EMULATED __m512 emulated_whole(__m256 a, __m256 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
EMULATED __m512i emulated_whole(__m256i a, __m256i b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7); }
EMULATED __m512d emulated_whole(__m256d a, __m256d b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7); }

#define BY_HALVES(name, operation)                                                                   \
  template <typename... Args> EMULATED auto emulated_##name(Args... args) {                          \
    return emulated_whole(operation(emulated_half(args, 0)...), operation(emulated_half(args, 1)...)); \
  }
BY_HALVES(add_ps, _mm256_add_ps)
BY_HALVES(sub_ps, _mm256_sub_ps)
BY_HALVES(mul_ps, _mm256_mul_ps)
BY_HALVES(div_ps, _mm256_div_ps)
BY_HALVES(max_ps, _mm256_max_ps)
BY_HALVES(min_ps, _mm256_min_ps)
BY_HALVES(sqrt_ps, _mm256_sqrt_ps)
BY_HALVES(fmadd_ps, _mm256_fmadd_ps)
BY_HALVES(unpacklo_ps, _mm256_unpacklo_ps)
BY_HALVES(unpackhi_ps, _mm256_unpackhi_ps)
BY_HALVES(unpacklo_pd, _mm256_unpacklo_pd)
BY_HALVES(unpackhi_pd, _mm256_unpackhi_pd)
BY_HALVES(unpacklo_epi32, _mm256_unpacklo_epi32)
BY_HALVES(unpackhi_epi32, _mm256_unpackhi_epi32)
BY_HALVES(unpacklo_epi64, _mm256_unpacklo_epi64)
BY_HALVES(unpackhi_epi64, _mm256_unpackhi_epi64)
BY_HALVES(cvtepi32_ps, _mm256_cvtepi32_ps)
BY_HALVES(cvtps_epi32, _mm256_cvtps_epi32)
BY_HALVES(cvttps_epi32, _mm256_cvttps_epi32)
BY_HALVES(and_si512, _mm256_and_si256)
BY_HALVES(or_si512, _mm256_or_si256)
BY_HALVES(xor_si512, _mm256_xor_si256)
BY_HALVES(add_epi16, _mm256_add_epi16)
BY_HALVES(sub_epi8, _mm256_sub_epi8)
BY_HALVES(sub_epi16, _mm256_sub_epi16)
BY_HALVES(add_epi32, _mm256_add_epi32)
BY_HALVES(sub_epi32, _mm256_sub_epi32)
BY_HALVES(max_epi32, _mm256_max_epi32)
BY_HALVES(subs_epu16, _mm256_subs_epu16)
BY_HALVES(avg_epu16, _mm256_avg_epu16)
BY_HALVES(madd_epi16, _mm256_madd_epi16)
BY_HALVES(mullo_epi16, _mm256_mullo_epi16)
BY_HALVES(shuffle_epi8, _mm256_shuffle_epi8)
BY_HALVES(packus_epi32, _mm256_packus_epi32)
BY_HALVES(slli_epi16, _mm256_slli_epi16)
BY_HALVES(srli_epi16, _mm256_srli_epi16)
BY_HALVES(slli_epi32, _mm256_slli_epi32)
BY_HALVES(srli_epi32, _mm256_srli_epi32)
BY_HALVES(srai_epi32, _mm256_srai_epi32)
#undef BY_HALVES

// --- constants, memory, conversions
// ----------------------------------------------------------------------------------------------------

EMULATED void emulated_aligned(const void* p) { if (uintptr_t(p) % 64) __builtin_trap(); }
EMULATED __m512i emulated_loadu_si512(const void* p) { __m512i x; memcpy(&x, p, 64); return x; }
EMULATED __m512i emulated_load_si512(const void* p) { emulated_aligned(p); return emulated_loadu_si512(p); }
EMULATED __m512 emulated_loadu_ps(const void* p) { __m512 x; memcpy(&x, p, 64); return x; }
EMULATED void emulated_storeu_si512(void* p, __m512i x) { memcpy(p, &x, 64); }
EMULATED void emulated_store_si512(void* p, __m512i x) { emulated_aligned(p); memcpy(p, &x, 64); }
EMULATED void emulated_storeu_ps(void* p, __m512 x) { memcpy(p, &x, 64); }

EMULATED __m512 emulated_setzero_ps() { return __m512{}; }
EMULATED __m512i emulated_setzero_si512() { return __m512i{}; }
EMULATED __m512 emulated_set1_ps(float x) { return emulated_whole(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
EMULATED __m512i emulated_set1_epi8(char x) { return emulated_whole(_mm256_set1_epi8(x), _mm256_set1_epi8(x)); }
EMULATED __m512i emulated_set1_epi16(short x) { return emulated_whole(_mm256_set1_epi16(x), _mm256_set1_epi16(x)); }
EMULATED __m512i emulated_set1_epi32(int x) { return emulated_whole(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
template <typename T, typename... Args> EMULATED __m512i emulated_set(Args... highest_first) {
  const T values[] = {T(highest_first)...};
  T lanes[64 / sizeof(T)];
  static_assert(sizeof(values) == 64);
  for (size_t i = 0; i < 64 / sizeof(T); i++) lanes[i] = values[64 / sizeof(T) - 1 - i];
  return emulated_loadu_si512(lanes);
}
template <typename... Args> EMULATED __m512i emulated_set_epi16(Args... args) { return emulated_set<int16_t>(args...); }
template <typename... Args> EMULATED __m512i emulated_set_epi32(Args... args) { return emulated_set<int32_t>(args...); }

EMULATED __m512i emulated_broadcast_i32x4(__m128i x) {
  return emulated_whole(_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x));
}
EMULATED __m512i emulated_castps_si512(__m512 x) { return (__m512i)x; }
EMULATED __m512 emulated_castsi512_ps(__m512i x) { return (__m512)x; }
EMULATED __m512d emulated_castps_pd(__m512 x) { return (__m512d)x; }
EMULATED __m512 emulated_castpd_ps(__m512d x) { return (__m512)x; }

EMULATED __m512i emulated_cvtepu16_epi32(__m256i x) {
  return emulated_whole(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                        _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}
EMULATED __m512i emulated_cvtepu8_epi32(__m128i x) {
  return emulated_whole(_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)));
}
EMULATED __m512i emulated_cvtepu8_epi16(__m256i x) {
  return emulated_whole(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(x)),
                        _mm256_cvtepu8_epi16(_mm256_extracti128_si256(x, 1)));
}
EMULATED __m512i emulated_cvtepi8_epi32(__m128i x) {
  return emulated_whole(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
EMULATED __m512i emulated_maskz_loadu_epi8(__mmask64 mask, const void* p) {
  char x[64];
  for (int i = 0; i < 64; i++) x[i] = mask >> i & 1 ? ((const char*)p)[i] : 0;
  return emulated_loadu_si512(x);
}
EMULATED __m512i emulated_cvtepi8_epi16(__m256i x) {
  return emulated_whole(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)),
                        _mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1)));
}
EMULATED __m512i emulated_castsi256_si512(__m256i x) { return emulated_whole(x, _mm256_setzero_si256()); }
EMULATED __m512i emulated_inserti64x4(__m512i x, __m256i y, int half) {
  const auto lanes = (__v8di)x;
  const auto other = (__v4di)y;
  __v8di out = lanes;
  for (int i = 0; i < 4; i++) out[4 * half + i] = other[i];
  return (__m512i)out;
}
EMULATED __m512i emulated_srlv_epi16(__m512i x, __m512i counts) {
  const auto lanes = (__v32hu)x, by = (__v32hu)counts;
  __v32hu out;
  for (int i = 0; i < 32; i++) out[i] = by[i] < 16 ? (unsigned short)(lanes[i] >> by[i]) : 0;
  return (__m512i)out;
}
EMULATED __m128i emulated_cvtepi32_epi8(__m512i x) {
  const auto lanes = (__v16si)x;
  __v16qi out;
  for (int i = 0; i < 16; i++) out[i] = char(lanes[i]);
  return (__m128i)out;
}
EMULATED __m256i emulated_cvtsepi32_epi16(__m512i x) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(emulated_half(x, 0), emulated_half(x, 1)), 0xd8);
}
EMULATED __m256i emulated_cvtepi32_epi16(__m512i x) {
  const auto lanes = (__v16si)x;
  __v16hi out;
  for (int i = 0; i < 16; i++) out[i] = short(lanes[i]);
  return (__m256i)out;
}
#define emulated_cvtps_ph(x, rounding) \
  _mm256_set_m128i(_mm256_cvtps_ph(emulated_half(x, 1), rounding), _mm256_cvtps_ph(emulated_half(x, 0), rounding))
EMULATED __m512 emulated_cvtph_ps(__m256i x) {
  return emulated_whole(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}

// --- arithmetic
// ----------------------------------------------------------------------------------------------------

EMULATED __m512 emulated_roundscale_ps(__m512 x, int to_whole) {
  if (to_whole != 0) __builtin_trap();  // nothing else is used
  return emulated_whole(_mm256_round_ps(emulated_half(x, 0), 0), _mm256_round_ps(emulated_half(x, 1), 0));
}
// For n of up to 250 either way, in two factors, since 2^-150 is no float.
EMULATED __m512 emulated_scalef_ps(__m512 x, __m512 by) {
  by = emulated_min_ps(emulated_max_ps(by, emulated_set1_ps(-250.f)), emulated_set1_ps(250.f));
  const auto n = (__v16si)emulated_cvtps_epi32(
      emulated_whole(_mm256_floor_ps(emulated_half(by, 0)), _mm256_floor_ps(emulated_half(by, 1))));
  const __v16si first = n >> 1, second = n - first;
  return x * (__m512)((first + 127) << 23) * (__m512)((second + 127) << 23);
}
EMULATED float emulated_reduce_add_ps(__m512 x) {
  const __m256 s = _mm256_add_ps(emulated_half(x, 0), emulated_half(x, 1));
  const auto t = (__v4sf)_mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  return (t[0] + t[2]) + (t[1] + t[3]);
}
EMULATED float emulated_reduce_max_ps(__m512 x) {
  const __m256 s = _mm256_max_ps(emulated_half(x, 0), emulated_half(x, 1));
  const auto t = (__v4sf)_mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  return std::fmax(std::fmax(t[0], t[2]), std::fmax(t[1], t[3]));
}
EMULATED int emulated_reduce_add_epi32(__m512i x) {
  unsigned sum = 0;
  for (int i = 0; i < 16; i++) sum += unsigned(((__v16si)x)[i]);
  return int(sum);
}
EMULATED __m512i emulated_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i out{};
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return out;
}

// --- bf16 and pairs of 16-bit numbers
// ----------------------------------------------------------------------------------------------------

EMULATED __m512 emulated_flushed(__m512 x) {  // denormals to zeros of their sign
  const auto bits = (__v16si)x;
  return (__m512)(bits & (((bits & 0x7f800000) != 0) | int(0x80000000)));
}
EMULATED __m512 emulated_low_bf16(__m512i pairs) { return emulated_flushed((__m512)((__v16si)pairs << 16)); }
EMULATED __m512 emulated_high_bf16(__m512i pairs) {
  return emulated_flushed((__m512)((__v16si)pairs & int(0xffff0000)));
}
EMULATED __m512 emulated_dp_bf16(__m512 sum, __m512i a, __m512i b) {
  sum = emulated_fmadd_ps(emulated_high_bf16(a), emulated_high_bf16(b), sum);
  return emulated_fmadd_ps(emulated_low_bf16(a), emulated_low_bf16(b), sum);
}
EMULATED __m512 emulated_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  return emulated_dp_bf16(sum, (__m512i)a, (__m512i)b);
}
EMULATED __m256bh emulated_cvtneps_pbh(__m512 x) {
  const auto bits = (__v16su)emulated_flushed(x);
  const auto nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const auto is_nan = (__v16su)((bits & 0x7fffffff) > 0x7f800000);
  return (__m256bh)emulated_cvtepi32_epi16((__m512i)((is_nan & (bits >> 16 | 0x40)) | (~is_nan & nearest)));
}
EMULATED __m512bh emulated_cvtne2ps_pbh(__m512 high, __m512 low) {
  return (__m512bh)emulated_whole((__m256i)emulated_cvtneps_pbh(low), (__m256i)emulated_cvtneps_pbh(high));
}
EMULATED __m512i emulated_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  return emulated_add_epi32(sum, emulated_madd_epi16(a, b));
}
// Four bytes of x and y each, those of x with their sign, those of y as kSigned says.
template <bool kSigned> EMULATED __m512i emulated_dp_bytes(__m512i sum, __m512i x, __m512i y) {
  auto total = (__v16si)sum;
  for (int byte = 0; byte < 4; byte++) {
    const __v16si left = ((__v16si)x << (24 - 8 * byte)) >> 24, shifted = (__v16si)y << (24 - 8 * byte);
    total += left * (kSigned ? shifted >> 24 : (__v16si)((__v16su)shifted >> 24));
  }
  return (__m512i)total;
}
// Adds to each lane four products of an unsigned byte of a and a signed byte of b.
EMULATED __m512i emulated_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  return emulated_dp_bytes<false>(sum, b, a);
}

// --- masks
// ----------------------------------------------------------------------------------------------------

#define emulated_cmp_ps_mask(a, b, predicate)                                                                     \
  __mmask16(_mm256_movemask_ps(_mm256_cmp_ps(emulated_half(a, 0), emulated_half(b, 0), predicate)) |              \
            _mm256_movemask_ps(_mm256_cmp_ps(emulated_half(a, 1), emulated_half(b, 1), predicate)) << 8)
EMULATED __mmask32 emulated_cmpgt_epu16_mask(__m512i a, __m512i b) {
  __mmask32 mask = 0;
  for (int i = 0; i < 32; i++) mask |= __mmask32(((__v32hu)a)[i] > ((__v32hu)b)[i]) << i;
  return mask;
}
EMULATED __m512i emulated_blend(__m512i otherwise, __m512i lanes, __m512i x) {
  return (x & lanes) | (otherwise & ~lanes);
}
EMULATED __m512i emulated_dwords(__mmask16 mask) {
  const __v16si bits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return (__m512i)((bits & int(mask)) != 0);
}
template <typename V> EMULATED __m512i emulated_elements(uint64_t mask) {
  V lanes;
  for (size_t i = 0; i < sizeof(V) / sizeof(lanes[0]); i++) lanes[i] = mask >> i & 1 ? -1 : 0;
  return (__m512i)lanes;
}
EMULATED __m512i emulated_mask_blend_epi16(__mmask32 mask, __m512i otherwise, __m512i x) {
  return emulated_blend(otherwise, emulated_elements<__v32hi>(mask), x);
}
EMULATED __m512i emulated_mask_mov_epi32(__m512i otherwise, __mmask16 mask, __m512i x) {
  return emulated_blend(otherwise, emulated_dwords(mask), x);
}
EMULATED __m512 emulated_mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 x) {
  return (__m512)emulated_mask_mov_epi32((__m512i)otherwise, mask, (__m512i)x);
}
EMULATED __m512 emulated_maskz_mov_ps(__mmask16 mask, __m512 x) { return emulated_mask_mov_ps(__m512{}, mask, x); }
EMULATED __m512 emulated_maskz_div_ps(__mmask16 mask, __m512 a, __m512 b) {
  return emulated_mask_mov_ps(__m512{}, mask, a / b);
}
EMULATED __m512i emulated_maskz_slli_epi16(__mmask32 mask, __m512i x, int count) {
  return emulated_slli_epi16(x, count) & emulated_elements<__v32hi>(mask);
}
EMULATED __m512 emulated_maskz_compress_ps(__mmask16 mask, __m512 x) {
  __m512 out{};
  for (int i = 0, n = 0; i < 16; i++)
    if (mask >> i & 1) out[n++] = x[i];
  return out;
}

// --- permutations
// ----------------------------------------------------------------------------------------------------

template <typename V, typename Index> EMULATED V emulated_permute(V a, Index index, V b) {
  constexpr int count = sizeof(V) / sizeof(a[0]);
  V out;
  for (int i = 0; i < count; i++) {
    const int from = int(index[i]) & (2 * count - 1);
    out[i] = from < count ? a[from] : b[from - count];
  }
  return out;
}
EMULATED __m512 emulated_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
  return emulated_permute(a, (__v16si)index, b);
}
EMULATED __m512i emulated_permutex2var_epi32(__m512i a, __m512i index, __m512i b) {
  return (__m512i)emulated_permute((__v16si)a, (__v16si)index, (__v16si)b);
}
EMULATED __m512i emulated_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  return (__m512i)emulated_permute((__v32hi)a, (__v32hi)index, (__v32hi)b);
}
EMULATED __m512 emulated_permutexvar_ps(__m512i index, __m512 a) { return emulated_permute(a, (__v16si)index, a); }
EMULATED __m512i emulated_permutexvar_epi32(__m512i index, __m512i a) {
  return (__m512i)emulated_permute((__v16si)a, (__v16si)index, (__v16si)a);
}
EMULATED __m512i emulated_maskz_permutexvar_epi8(__mmask64 mask, __m512i index, __m512i a) {
  return (__m512i)emulated_permute((__v64qi)a, (__v64qi)index, (__v64qi)a) & emulated_elements<__v64qi>(mask);
}
EMULATED __m512 emulated_shuffle_f32x4(__m512 a, __m512 b, int choice) {
  __m128 from[2][4], out[4];
  memcpy(from[0], &a, 64);
  memcpy(from[1], &b, 64);
  for (int i = 0; i < 4; i++) out[i] = from[i / 2][choice >> 2 * i & 3];
  return emulated_bits<__m512>(out);
}
EMULATED __m512i emulated_shuffle_i32x4(__m512i a, __m512i b, int choice) {
  return (__m512i)emulated_shuffle_f32x4((__m512)a, (__m512)b, choice);
}

// --- AMX
// ----------------------------------------------------------------------------------------------------

#ifdef EMULATE_AMX
struct EmulatedTiles {
  struct Config { uint8_t palette, start_row, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } config;
  alignas(64) char data[8][16][64];
  char* row(int t, int r) { return data[t][r]; }
  __m512i line(int t, int r) { return emulated_loadu_si512(data[t][r]); }
};
inline thread_local EmulatedTiles emulated_tiles;

static inline void emulated_ldtilecfg(const void* config) {
  emulated_tiles = {};
  memcpy(&emulated_tiles.config, config, 64);
}
static inline void emulated_tilerelease() { emulated_tiles = {}; }

static inline void emulated_tilezero(int t) {
  if (emulated_tiles.config.palette != 1) __builtin_trap();  // as the instruction: no tiles are configured
  memset(emulated_tiles.data[t], 0, sizeof(emulated_tiles.data[t]));
}
static inline void emulated_tileload(int t, const void* from, long stride) {
  emulated_tilezero(t);
  for (int r = 0; r < emulated_tiles.config.rows[t]; r++)
    memcpy(emulated_tiles.row(t, r), (const char*)from + r * stride, emulated_tiles.config.bytes[t]);
}
static inline void emulated_tilestore(int t, void* to, long stride) {
  if (emulated_tiles.config.palette != 1) __builtin_trap();
  for (int r = 0; r < emulated_tiles.config.rows[t]; r++)
    memcpy((char*)to + r * stride, emulated_tiles.row(t, r), emulated_tiles.config.bytes[t]);
}

// c += a * b, whose dwords are summed by step(sum, dword of a in all lanes, dwords of b). The shapes must fit, as the
// instruction demands.
template <typename Step> EMULATED void emulated_tile_products(int c, int a, int b, Step step) {
  auto& tiles = emulated_tiles;
  const auto& config = tiles.config;
  if (config.rows[c] != config.rows[a] || config.bytes[c] != config.bytes[b] || config.bytes[a] != 4 * config.rows[b])
    __builtin_trap();
  for (int r = 0; r < config.rows[c]; r++) {
    __m512i sum = tiles.line(c, r);
    for (int k = 0; k < config.rows[b]; k++) {
      int pair;
      memcpy(&pair, tiles.row(a, r) + 4 * k, 4);
      sum = step(sum, emulated_set1_epi32(pair), tiles.line(b, k));
    }
    memcpy(tiles.row(c, r), &sum, config.bytes[c]);
  }
}
static inline void emulated_tdpbf16ps(int c, int a, int b) {
  emulated_tile_products(
      c, a, b, [](__m512i sum, __m512i x, __m512i y) { return (__m512i)emulated_dp_bf16((__m512)sum, x, y); });
}
static inline void emulated_tdpbssd(int c, int a, int b) { emulated_tile_products(c, a, b, emulated_dp_bytes<true>); }
static inline void emulated_tdpbsud(int c, int a, int b) { emulated_tile_products(c, a, b, emulated_dp_bytes<false>); }

#define TILE_LOAD(t, p, stride) emulated_tileload(t, p, stride)
#define TILE_LOAD_FAR(t, p, stride) emulated_tileload(t, p, stride)
#define TILE_STORE(t, p, stride) emulated_tilestore(t, p, stride)
#define TILE_ZERO(t) emulated_tilezero(t)
#define TILE_DP_SU(c, a, b) emulated_tdpbsud(c, a, b)
#define TILE_DP_SS(c, a, b) emulated_tdpbssd(c, a, b)
#define TILE_DP(c, a, b) emulated_tdpbf16ps(c, a, b)
#endif
