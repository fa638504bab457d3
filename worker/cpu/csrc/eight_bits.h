// Keys and values in 8 bits, with one scale per head of a token (worker/attention/scaled.py defines the arithmetic).
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

struct Scales {  // of the keys or the values of a layer; strides in elements, all 0 if there is one number only
  float* base;
  long block, slot, head;
  float* at(long block_id, long slot_in_block, long h) const {
    return base + block_id * block + slot_in_block * slot + h * head;
  }
  bool constant() const { return slot == 0; }
};

namespace {

enum CacheType { kLikeActivations = 0, kInt8 = 1, kE4m3 = 2 };  // of the elements of a cache

template <typename C> constexpr bool kScaled = std::is_same_v<C, int8_t> || std::is_same_v<C, e4m3>;
template <typename C> constexpr float kLargest = std::is_same_v<C, int8_t> ? 127.f : 448.f;
// What load() divides a number by
template <typename C> constexpr float kLoadedPart = std::is_same_v<C, e4m3> ? 256.f : 1.f;

constexpr float kLeast = 1e-30f;  // a head whose largest entry is below this is stored as zeros

// x is at most 448 in magnitude, or NaN.
inline e4m3 to_e4m3(float x) {
  uint32_t u, small;
  memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 0x80;
  u &= 0x7fffffff;
  const float units =
      std::fabs(x) * 512 + 12582912.f;  // below 2^-6 the step is 2^-9: rounded to an integer in the low bits
  memcpy(&small, &units, 4);
  const uint32_t large = ((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
  const uint32_t magnitude = u > 0x7f800000u ? 0x7f : u < 0x3c800000u ? small & 0xff : large;
  return {uint8_t(sign | magnitude)};
}

inline void round_to(int8_t* to, const float* x, long d) {
  long i = 0;
  for (; i + 16 <= d; i += 16) store_bytes(to + i, nearest(load(x + i)));
  for (; i < d; i++) to[i] = int8_t(std::nearbyint(x[i]));
}
inline void round_to(e4m3* to, const float* x, long d) {
  for (long i = 0; i < d; i++) to[i] = to_e4m3(x[i]);
}

// Stores a head x of d entries, at most 576, and its scale, or with a constant scale that is read.
template <typename T, typename C>
void store_head(const T* x, long d, C* to, float* scale, bool constant) {
  alignas(64) float v[576];
  vf top = zero(), none = zero();
  float largest = 0, tail = 0;  // tail and none become NaN if an entry is not finite
  long i = 0;
  for (; i + 16 <= d; i += 16) {
    const vf e = load(x + i);
    store(v + i, e);
    top = max(top, max(e, zero() - e));
    none = fma(e, zero(), none);
  }
  for (; i < d; i++) v[i] = to_float(x[i]), largest = std::max(largest, std::fabs(v[i])), tail += v[i] * 0;
  largest = std::max(largest, reduce_max(top)) + (reduce_add(none) + tail);
  float inverse;
  if (constant) {
    inverse = 1.f / *scale;
  } else {
    *scale = largest / kLargest<C>;
    inverse = largest < kLeast ? 0.f : kLargest<C> / largest;
  }
  const vf by = set1(inverse), most = set1(kLargest<C>), least = set1(-kLargest<C>);
  for (i = 0; i + 16 <= d; i += 16) store(v + i, max(least, min(most, load(v + i) * by)));
  for (; i < d; i++) v[i] = std::max(-kLargest<C>, std::min(kLargest<C>, v[i] * inverse));
  round_to(to, v, d);
}

}  // namespace
