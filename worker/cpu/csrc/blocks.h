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

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the value

// w[i], w[i + 16] of one block of 32 values = the low and high halves of 16 bytes, less `zero`.
inline void halves(const uint8_t* q, int zero, int16_t* w) {
  for (int i = 0; i < 16; i++) w[i] = int16_t((q[i] & 15) - zero), w[i + 16] = int16_t((q[i] >> 4) - zero);
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
  if (TYPE == kQ8_0) for (int i = 0; i < 32; i++) w[i] = int8_t(b[2 + i]);
  if (TYPE == kIQ4_NL) looked_up(b + 2, kIq4, w);
  if (TYPE == kMXFP4) looked_up(b + 1, kE2m1, w), *d = std::ldexp(1.f, int(b[0]) - 128);
}

// Eight scales and eight minima of six bits in twelve bytes.
inline void six_bits(const uint8_t* s, uint8_t* scales, uint8_t* minima) {
  for (int j = 0; j < 4; j++) {
    scales[j] = s[j] & 63, minima[j] = s[j + 4] & 63;
    scales[j + 4] = uint8_t((s[j + 8] & 15) | s[j] >> 6 << 4), minima[j + 4] = uint8_t(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
  }
}

template <int TYPE>
void unpack_super(const uint8_t* b, Unpacked& u);

template <>
inline void unpack_super<kQ4_K>(const uint8_t* b, Unpacked& u) {
  uint8_t scales[8], minima[8];
  six_bits(b + 4, scales, minima);
  const float dmin = half_at(b + 2);
  u.d[0] = half_at(b);
  for (int j = 0; j < 16; j++) u.minima[j] = dmin * minima[j / 2];
  for (int j = 0; j < 4; j++) {
    const uint8_t* q = b + 16 + 32 * j;
    const int16_t low = scales[2 * j], high = scales[2 * j + 1];
    int16_t* w = u.w + 64 * j;
    for (int i = 0; i < 32; i++) w[i] = int16_t((q[i] & 15) * low);
    for (int i = 0; i < 32; i++) w[32 + i] = int16_t((q[i] >> 4) * high);
  }
}

template <>
inline void unpack_super<kQ5_K>(const uint8_t* b, Unpacked& u) {
  uint8_t scales[8], minima[8];
  six_bits(b + 4, scales, minima);
  const float dmin = half_at(b + 2);
  u.d[0] = half_at(b);
  for (int j = 0; j < 16; j++) u.minima[j] = dmin * minima[j / 2];
  for (int j = 0; j < 4; j++) {
    const uint8_t *q = b + 48 + 32 * j, *h = b + 16;
    const int16_t low = scales[2 * j], high = scales[2 * j + 1];
    int16_t* w = u.w + 64 * j;
    for (int i = 0; i < 32; i++) w[i] = int16_t(((q[i] & 15) + (h[i] >> (2 * j) & 1) * 16) * low);
    for (int i = 0; i < 32; i++) w[32 + i] = int16_t(((q[i] >> 4) + (h[i] >> (2 * j + 1) & 1) * 16) * high);
  }
}

template <>
inline void unpack_super<kQ6_K>(const uint8_t* b, Unpacked& u) {
  const int8_t* scales = (const int8_t*)b + 192;
  u.d[0] = half_at(b + 208);
  for (int half = 0; half < 2; half++)
    for (int part = 0; part < 4; part++)  // 32 values
      for (int run = 0; run < 2; run++) {
        const uint8_t *low = b + 64 * half + part % 2 * 32 + run * 16, *high = b + 128 + 32 * half + run * 16;
        const int16_t scale = scales[8 * half + 2 * part + run];
        int16_t* w = u.w + 128 * half + 32 * part + 16 * run;
        for (int i = 0; i < 16; i++) w[i] = int16_t((((low[i] >> (part / 2 * 4)) & 15) + (high[i] >> (2 * part) & 3) * 16 - 32) * scale);
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
