// Weights of 4 to 8 bits per value, with a scale and possibly an offset per column and group of k:
//     weight = scale * (code - zero point) + offset
// Each block of 32 columns and step of 64 k has two tiles of 16 columns; a tile is 16 rows of 16 columns x 4 consecutive
// k, the layout of the right operand of AMX's byte products. A row of codes is a line of 64 bytes; codes of fewer bits
// share lines:
//     4 bits   the halves of a line's bytes are two rows
//     5 bits   eight rows: four such lines, then one with their fifth bits
//     6 bits   four rows: two such lines, then one with their upper two bits
//
// Kinds of scales:
//     kIntegers4, kIntegers8  scales and offsets f16 or bf16 [columns / 32][groups][32], offsets may be absent; a group
//                             is 32, 64, 128 or a multiple of 256 long
//     kFloats4                codes are 4-bit floats (MXFP4); scales are exponents of two, uint8 [columns / 32][groups
//                             of 32][32]
//     kFloats8                codes are 8-bit floats (e4m3); scales are float32 [columns / 32][groups][32]
//     kQ4_Kind and so on      as in GGUF files: integer scales of groups of 32 (Q6_K: 16) within 256, see SuperScales
#pragma once

#include "simd.h"

enum QuantKind { kIntegers4, kIntegers8, kFloats4, kQ4_Kind, kQ5_Kind, kQ6_Kind, kFloats8, kQuantKinds };  // numbered as in worker/cpu/ops.py

constexpr int quant_bits(int kind) {
  constexpr int bits[kQuantKinds] = {4, 8, 4, 4, 5, 6, 8};
  return bits[kind];
}
constexpr int quant_zero_point(int kind) {
  constexpr int points[kQuantKinds] = {8, 128, 12, 0, 0, 32, 0};
  return points[kind];
}
constexpr bool is_super_kind(int kind) { return kind >= kQ4_Kind && kind <= kQ6_Kind; }

struct Quant {
  const uint8_t* data;
  const void* scales;
  const void* offsets;  // may be null
  int kind, group, groups, k_steps;
  int half = 0;  // scales and offsets are f16 instead of bf16

  int bits() const { return quant_bits(kind); }
  int zero_point() const { return quant_zero_point(kind); }
  long step_bytes() const { return bits() * 256; }
  const uint8_t* step(int nb, int s) const { return data + (long(nb) * k_steps + s) * step_bytes(); }
  long group_at(int nb, int k) const { return (long(nb) * groups + k / group) * 32; }
  // Number of k whose products are added before scales are applied; 256 * 127 * 32767 still fits 32 bits
  int span() const { return group < 256 ? group : 256; }
  // Sixteen scales or offsets of kIntegers4 and kIntegers8, or one
  vf sixteen(const void* table, long at) const { return half ? load((const f16*)table + at) : load((const bf16*)table + at); }
  void put(const void* table, long at, float value) const {
    if (kind == kFloats8) ((float*)table)[at] = value;
    else if (half) store_scalar((f16*)table + at, value);
    else store_scalar((bf16*)table + at, value);
  }
  // The scales of 256 k of kQ4_K and so on
  static constexpr int super_bytes(int kind) { return kind == kQ6_Kind ? 576 : 512; }
  uint8_t* super(int nb, int s) const { return (uint8_t*)scales + (long(nb) * (k_steps / 4) + s) * super_bytes(kind); }
};

// --- codes -----------------------------------------------------------------------------------------------------------

alignas(16) constexpr uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // 12 + twice the value

// Calls f(i, codes), i < 4: codes are four consecutive k of kLanes columns in bytes, of 16 k. `at`: 32 k of a tile (AVX2:
// of its columns). half: which 16 k of the 32.
template <int KIND, typename F>
__attribute__((always_inline)) inline void codes_of(const uint8_t* at, int half, F&& f) {
  const Ints low = set1_words(0x0f0f);
  if constexpr (quant_bits(KIND) == 8) {
    for (int i = 0; i < 4; i++) f(i, load_ints(at + half * 256 + i * 64));
  } else if constexpr (quant_bits(KIND) == 4) {
    const Ints table = repeat(_mm_load_si128((const __m128i*)kE2m1Codes));
    for (int i = 0; i < 2; i++) {
      const Ints line = load_ints(at + half * 128 + i * 64), a = line & low, b = words_right<4>(line) & low;
      if constexpr (KIND == kFloats4) f(2 * i, shuffle_bytes(table, a)), f(2 * i + 1, shuffle_bytes(table, b));
      else f(2 * i, a), f(2 * i + 1, b);
    }
  } else if constexpr (quant_bits(KIND) == 5) {
    const Ints fifth = set1_words(0x1010), high = load_ints(at + 256);
    auto join = [&](Ints nibbles, Ints bits) { return or_masked(nibbles, bits, fifth); };
    for (int i = 0; i < 2; i++) {
      const Ints line = load_ints(at + half * 128 + i * 64), a = line & low, b = words_right<4>(line) & low;
      if (half == 0) f(2 * i, join(a, i ? words_left<2>(high) : words_left<4>(high))), f(2 * i + 1, join(b, i ? words_left<1>(high) : words_left<3>(high)));
      else f(2 * i, join(a, i ? words_right<2>(high) : high)), f(2 * i + 1, join(b, i ? words_right<3>(high) : words_right<1>(high)));
    }
  } else {
    const Ints upper = set1_words(0x3030), high = load_ints(at + half * 192 + 128);
    for (int i = 0; i < 2; i++) {
      const Ints line = load_ints(at + half * 192 + i * 64);
      f(2 * i, or_masked(line & low, i ? high : words_left<4>(high), upper));
      f(2 * i + 1, or_masked(words_right<4>(line) & low, i ? words_right<2>(high) : words_left<2>(high), upper));
    }
  }
}

// Calls f with the kind as a compile-time constant.
template <typename F>
inline void of_kind(int kind, F&& f) {
  switch (kind) {
    case kIntegers4: return f(std::integral_constant<int, kIntegers4>());
    case kIntegers8: return f(std::integral_constant<int, kIntegers8>());
    case kFloats4: return f(std::integral_constant<int, kFloats4>());
    case kQ4_Kind: return f(std::integral_constant<int, kQ4_Kind>());
    case kQ5_Kind: return f(std::integral_constant<int, kQ5_Kind>());
    case kQ6_Kind: return f(std::integral_constant<int, kQ6_Kind>());
    default: return f(std::integral_constant<int, kFloats8>());
  }
}

// Byte J of each lane, an 8-bit float, as a float. Its exponent's bias is 7, that of a float 127; a number without leading
// one stays one until the product.
template <int J>
inline Floats widen_e4m3(Ints lanes) {
  const Ints top = J == 3 ? lanes : left<24 - J * 8>(lanes);
  return Floats(signed_right<4>(top) & set1_ints(int(0x87f00000u))) * set1_floats(0x1p120f);
}

// The address of 32 k of kLanes columns, for codes_of. column: a multiple of kLanes below 32.
inline const uint8_t* codes_at(const Quant& q, int nb, int k, int column) {
  return q.step(nb, k / 64) + column / 16 * q.bits() * 128 + k % 64 / 32 * q.bits() * 64 + column % 16 * 4;
}

// --- scales ----------------------------------------------------------------------------------------------------------

// The scales and offsets of kLanes columns in 256 k of a kQ4_K, kQ5_K or kQ6_K weight. In memory:
//     kQ4_K, kQ5_K   d, then dmin: f16 [32]; for each tile the twelve bytes of 6-bit numbers that GGUF files describe, four
//                    at a time: [3][16 columns][4]
//     kQ6_K          d: f16 [32]; for each tile int8 [4][16 columns][4 groups]
// scale = d * integer, offset = -dmin * integer.
template <int KIND>
class SuperScales {
 public:
  static constexpr int kGroup = KIND == kQ6_Kind ? 16 : 32;
  SuperScales(const uint8_t* super, int column) {
    const uint8_t* tile = super + (KIND == kQ6_Kind ? 64 + column / 16 * 256 : 128 + column / 16 * 192) + column % 16 * 4;
    d_ = halves(super + column * 2);
    if constexpr (KIND == kQ6_Kind) {
      for (int i = 0; i < 4; i++) scales_[i] = load_ints(tile + i * 64);
    } else {
      const Ints a = load_ints(tile), b = load_ints(tile + 64), c = load_ints(tile + 128);
      const Ints six = set1_words(0x3f3f), low = set1_words(0x0f0f), upper = set1_words(0x3030);
      scales_[0] = a & six, scales_[1] = or_masked(c & low, words_right<2>(a), upper);
      offsets_[0] = b & six, offsets_[1] = or_masked(words_right<4>(c) & low, words_right<2>(b), upper);
      dmin_ = halves(super + 64 + column * 2);
    }
  }
  Floats d() const { return d_; }
  Floats minus_dmin() const { return Floats{} - dmin_; }
  // The integers of group i.
  template <int I> Floats scale() const {
    if constexpr (KIND == kQ6_Kind) return to_floats(signed_right<24>(left<24 - I % 4 * 8>(scales_[I / 4])));
    else return byte<I % 4>(scales_[I / 4]);
  }
  template <int I> Floats offset() const { return byte<I % 4>(offsets_[I / 4]); }

 private:
  template <int I> static Floats byte(Ints x) { return to_floats(I == 3 ? right<24>(x) : right<I * 8>(x) & set1_ints(255)); }
  static Floats halves(const uint8_t* p) {
#if defined(__AVX512F__)
    return load((const f16*)p).v;
#else
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
  }
  Ints scales_[KIND == kQ6_Kind ? 4 : 2], offsets_[2];
  Floats d_, dmin_;
};

// 2 ** (exponent - 128) of kLanes exponents: half the scale, for codes that stand for twice the value. Below 2 ** -126
// it is zero.
inline Floats half_power(const uint8_t* exponents) {
  const Ints e = widen_bytes(exponents);
#if defined(__AVX512F__)
  return Floats(left<23>(_mm512_max_epi32(_mm512_sub_epi32(e, set1_ints(1)), set1_ints(0))));
#else
  return Floats(left<23>(_mm256_max_epi32(_mm256_sub_epi32(e, set1_ints(1)), set1_ints(0))));
#endif
}

// The scale of (code - zero point) and the offset of sixteen columns of tile t, for the 16 k from k on.
struct GroupNumbers { vf scale, offset; };
inline GroupNumbers numbers_of(const Quant& q, int nb, int k, int t) {
  const long at = q.group_at(nb, k) + t * 16;
  if (q.kind == kFloats8) return {load((const float*)q.scales + at), zero()};
  if (!is_super_kind(q.kind) && q.kind != kFloats4) {
    return {q.sixteen(q.scales, at), q.offsets ? q.sixteen(q.offsets, at) : zero()};
  }
  Floats scale[16 / kLanes], offset[16 / kLanes] = {};
  for (int part = 0; part < 16 / kLanes; part++) {
    const int column = t * 16 + part * kLanes;
    if (q.kind == kFloats4) {
      scale[part] = half_power((const uint8_t*)q.scales + q.group_at(nb, k) + column);
      continue;
    }
    auto of = [&](auto constant) {
      constexpr int KIND = constant;
      const SuperScales<KIND> super(q.super(nb, k / 256), column);
      auto group = [&](auto i) {
        if (k % 256 / SuperScales<KIND>::kGroup != i) return;
        scale[part] = super.template scale<i>() * super.d();
        if constexpr (KIND != kQ6_Kind) offset[part] = super.template offset<i>() * super.minus_dmin();
      };
      unrolled<256 / SuperScales<KIND>::kGroup>(group);
    };
    if (q.kind == kQ4_Kind) of(std::integral_constant<int, kQ4_Kind>());
    if (q.kind == kQ5_Kind) of(std::integral_constant<int, kQ5_Kind>());
    if (q.kind == kQ6_Kind) of(std::integral_constant<int, kQ6_Kind>());
  }
  return {whole(scale), whole(offset)};
}

// Calls f(k, value) with the k values of a row of the weight, 16 at a time.
template <typename F>
inline void for_row(const Quant& q, long row, int k, F&& f) {
  const int nb = int(row / 32), column = int(row % 32), part = column / kLanes * kLanes;
  of_kind(q.kind, [&](auto kind) {
    for (int at = 0; at < k; at += 16) {
      alignas(64) uint8_t codes[4][4 * kLanes];
      const uint8_t* from = codes_at(q, nb, at, part);
      auto keep = [&](int i, Ints bytes) { store_ints(codes[i], bytes); };
      at % 32 ? codes_of<kind>(from, 1, keep) : codes_of<kind>(from, 0, keep);
      float scales[16], offsets[16];
      const GroupNumbers numbers = numbers_of(q, nb, at, column / 16);
      store(scales, numbers.scale), store(offsets, numbers.offset);
      for (int i = 0; i < 16 && at + i < k; i++) {
        const int code = codes[i / 4][(column - part) * 4 + i % 4];
        const float value = kind == kFloats8 ? widen_e4m3<0>(set1_ints(code))[0] : float(code - q.zero_point());
        f(at + i, value * scales[column % 16] + offsets[column % 16]);
      }
    }
  });
}
