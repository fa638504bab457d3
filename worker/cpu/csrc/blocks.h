// Rows of weights in the blocks of GGUF files (worker/layers/quantization/gguf_blocks.py describes them), unpacked 256
// values at a time to 16-bit integers:
//     value = d * w - minimum    one d for all, or one for each 32 values; minima of 16 values each, if any
// In the K types w includes the small scale of its group: at most 63 * 31, or 128 * 32.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

enum BlockType { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4, kBlockTypes };

constexpr int kSuper = 256;  // values that are unpacked together
constexpr int kSmall = 32;   // values of a block of the other types

struct Unpacked {
  alignas(64) int16_t w[kSuper];
  alignas(64) float minima[16];
  float d[8];
};

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

constexpr int kWords = 2 * kLanes;  // 16-bit integers of a register

// kWords bytes as 16-bit integers, and operations on these.
#if defined(__AVX512F__)
inline Ints widen(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline Ints widen_signed(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline Ints times(Ints x, Ints y) { return _mm512_mullo_epi16(x, y); }
// Each of kWords / 16 values in 16 words
inline Ints in_runs(const int16_t* p) { return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi16(p[0])), _mm256_set1_epi16(p[1]), 1); }
#else
inline Ints widen(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline Ints widen_signed(const uint8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline Ints times(Ints x, Ints y) { return _mm256_mullo_epi16(x, y); }
inline Ints in_runs(const int16_t* p) { return _mm256_set1_epi16(p[0]); }
#endif

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the value

// w[i], w[i + 16] of one block of 32 values = the low and high halves of 16 bytes, less `zero`.
inline void halves(const uint8_t* q, int zero, int16_t* w) {
  const Ints less = set1_words(zero);
#if defined(__AVX512F__)
  const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)q)));
  const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  store_ints(w, sub_words(_mm512_srlv_epi16(twice, shift) & set1_words(15), less));
#else
  const Ints bytes = widen(q);
  store_ints(w, sub_words(bytes & set1_words(15), less)), store_ints(w + 16, sub_words(words_right<4>(bytes), less));
#endif
}
inline void looked_up(const uint8_t* q, const int8_t* table, int16_t* w) {
  for (int i = 0; i < 16; i++) w[i] = table[q[i] & 15], w[i + 16] = table[q[i] >> 4];
}
inline void add_fifth_bits(const uint8_t* bits, int16_t* w) {
  uint32_t high;
  memcpy(&high, bits, 4);
  for (int i = 0; i < 32; i++) w[i] = int16_t(w[i] + (high >> i & 1) * 16);
}

// A block of 32 values: w, *d and, for types with minima, *minimum (to be subtracted).
template <int TYPE>
inline void unpack_small(const uint8_t* b, int16_t* w, float* d, float* minimum) {
  *d = TYPE == kMXFP4 ? 0.f : half_at(b);
  if (TYPE == kQ4_0) halves(b + 2, 8, w);
  if (TYPE == kQ4_1) halves(b + 4, 0, w), *minimum = -half_at(b + 2);
  if (TYPE == kQ5_0) halves(b + 6, 16, w), add_fifth_bits(b + 2, w);
  if (TYPE == kQ5_1) halves(b + 8, 0, w), add_fifth_bits(b + 4, w), *minimum = -half_at(b + 2);
  if (TYPE == kQ8_0) for (int i = 0; i < 32; i += kWords) store_ints(w + i, widen_signed(b + 2 + i));
  if (TYPE == kIQ4_NL) looked_up(b + 2, kIq4, w);
  if (TYPE == kMXFP4) looked_up(b + 1, kE2m1, w), *d = std::ldexp(1.f, int(b[0]) - 128);
}

// Eight scales, and eight minima times dmin twice each, from twelve bytes of six-bit numbers.
inline void six_bits(const uint8_t* s, float dmin, int16_t* scales, float* minima) {
  uint32_t part[3], bytes[4];
  memcpy(part, s, 12);
  bytes[0] = part[0] & 0x3f3f3f3f, bytes[1] = (part[2] & 0x0f0f0f0f) | (part[0] >> 6 & 0x03030303) << 4;
  bytes[2] = part[1] & 0x3f3f3f3f, bytes[3] = (part[2] >> 4 & 0x0f0f0f0f) | (part[1] >> 6 & 0x03030303) << 4;
  const __m128i all = _mm_loadu_si128((const __m128i*)bytes);
  _mm_storeu_si128((__m128i*)scales, _mm_cvtepu8_epi16(all));
  const __m256 eight = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))), _mm256_set1_ps(dmin));
  _mm256_storeu_ps(minima, _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)));
  _mm256_storeu_ps(minima + 8, _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)));
}

template <int TYPE>
void unpack_super(const uint8_t* b, Unpacked& u);

// Q4_K, and Q5_K with a fifth bit per value from `high`.
template <bool FIFTH>
inline void unpack_pairs(const uint8_t* b, const uint8_t* high, const uint8_t* q, Unpacked& u) {
  alignas(16) int16_t scales[8];
  six_bits(b + 4, half_at(b + 2), scales, u.minima);
  u.d[0] = half_at(b);
  const Ints low = set1_words(15);
  Ints bits[32 / kWords];
  if (FIFTH) for (int i = 0; i < 32 / kWords; i++) bits[i] = words_left<4>(widen(high + i * kWords));
  for (int j = 0; j < 4; j++) {
    const Ints first = set1_words(scales[2 * j]), second = set1_words(scales[2 * j + 1]);
    for (int i = 0; i < 32 / kWords; i++) {
      const Ints bytes = widen(q + 32 * j + i * kWords);
      Ints a = bytes & low, c = words_right<4>(bytes);
      if (FIFTH) {
        a = a | (bits[i] & set1_words(16)), c = c | (words_right<1>(bits[i]) & set1_words(16));
        bits[i] = words_right<2>(bits[i]);
      }
      store_ints(u.w + 64 * j + i * kWords, times(a, first));
      store_ints(u.w + 64 * j + 32 + i * kWords, times(c, second));
    }
  }
}

template <>
inline void unpack_super<kQ4_K>(const uint8_t* b, Unpacked& u) { unpack_pairs<false>(b, nullptr, b + 16, u); }
template <>
inline void unpack_super<kQ5_K>(const uint8_t* b, Unpacked& u) { unpack_pairs<true>(b, b + 16, b + 48, u); }

template <>
inline void unpack_super<kQ6_K>(const uint8_t* b, Unpacked& u) {
  alignas(32) int16_t scales[16];
  _mm256_storeu_si256((__m256i*)scales, _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(b + 192))));
  u.d[0] = half_at(b + 208);
  const Ints low = set1_words(15), two = set1_words(48), zero = set1_words(32);
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 32; i += kWords) {
      const Ints first = widen(b + 64 * half + i), second = widen(b + 64 * half + 32 + i), high = widen(b + 128 + 32 * half + i);
      const Ints parts[4] = {(first & low) | (words_left<4>(high) & two), (second & low) | (words_left<2>(high) & two), words_right<4>(first) | (high & two), words_right<4>(second) | (words_right<2>(high) & two)};
      for (int part = 0; part < 4; part++)
        store_ints(u.w + 128 * half + 32 * part + i, times(sub_words(parts[part], zero), in_runs(scales + 8 * half + 2 * part + i / 16)));
    }
}

template <>
inline void unpack_super<kQ3_K>(const uint8_t* b, Unpacked& u) {
  const uint8_t* s = b + 96;
  u.d[0] = half_at(b + 108);
  for (int j = 0; j < 16; j++) {
    const int scale = ((s[j % 8] >> (j / 8 * 4) & 15) | (s[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
    const int part = j / 2, run = j % 2 * 16;  // part of 32 values
    const uint8_t* q = b + 32 + part / 4 * 32 + run;
    for (int i = 0; i < 16; i++) u.w[16 * j + i] = int16_t(((q[i] >> (part % 4 * 2) & 3) + (b[run + i] >> part & 1) * 4 - 4) * scale);
  }
}

template <>
inline void unpack_super<kQ2_K>(const uint8_t* b, Unpacked& u) {
  const float dmin = half_at(b + 82);
  u.d[0] = half_at(b + 80);
  for (int j = 0; j < 16; j++) {
    const int part = j / 2, run = j % 2 * 16, scale = b[j] & 15;
    const uint8_t* q = b + 16 + part / 4 * 32 + run;
    u.minima[j] = dmin * float(b[j] >> 4);
    for (int i = 0; i < 16; i++) u.w[16 * j + i] = int16_t((q[i] >> (part % 4 * 2) & 3) * scale);
  }
}

template <>
inline void unpack_super<kIQ4_XS>(const uint8_t* b, Unpacked& u) {
  uint16_t high;
  memcpy(&high, b + 2, 2);
  u.d[0] = half_at(b);
  for (int j = 0; j < 8; j++) {
    const int scale = ((b[4 + j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4) - 32;
    looked_up(b + 8 + 16 * j, kIq4, u.w + 32 * j);
    for (int i = 0; i < 32; i++) u.w[32 * j + i] = int16_t(u.w[32 * j + i] * scale);
  }
}

constexpr bool is_super(int type) { return (type >= kQ2_K && type <= kQ6_K) || type == kIQ4_XS; }
constexpr bool has_minima(int type) { return type == kQ4_1 || type == kQ5_1 || type == kQ2_K || type == kQ4_K || type == kQ5_K; }
constexpr int block_bytes(int type) {
  constexpr int sizes[kBlockTypes] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 18, 136, 17};
  return sizes[type];
}

// Unpacks values 256 s .. 256 s + 255 of a row of k values, with zeros after its end.
template <int TYPE>
inline void unpack(const uint8_t* row, long s, long k, Unpacked& u) {
  if constexpr (is_super(TYPE)) {
    unpack_super<TYPE>(row + s * block_bytes(TYPE), u);
  } else {
    const long count = std::min(8L, k / kSmall - s * 8);
    for (long j = 0; j < count; j++) {
      float minimum = 0;
      unpack_small<TYPE>(row + (s * 8 + j) * block_bytes(TYPE), u.w + j * kSmall, u.d + j, &minimum);
      u.minima[2 * j] = u.minima[2 * j + 1] = minimum;
    }
    for (long j = count; j < 8; j++) memset(u.w + j * kSmall, 0, kSmall * 2), u.d[j] = u.minima[2 * j] = u.minima[2 * j + 1] = 0;
  }
}

}  // namespace
