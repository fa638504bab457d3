// Weights of 2 to 8 bits per value, with a scale and possibly an offset per column and group of k:
//     weight = scale * (code - zero point) + offset
// Each block of 32 columns and step of 64 k has two tiles of 16 columns; a tile is 16 rows of 16 columns x 4
// consecutive k, the layout of the right operand of AMX's byte products. A row of codes is a line of 64 bytes; codes of
// fewer bits share lines:
//     2 bits   the quarters of a line's bytes are four rows
//     3 bits   eight rows: two such lines, then one with their third bits
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
//     kQ4_1 to kIq4           as in GGUF files: scales, and for kQ4_1 and kQ5_1 offsets, f16 [columns / 32][groups of
//                             32][32]; the codes of kIq4 are indices of a table
//     kQ4_K and so on         as in GGUF files: integer scales of groups of 16 or 32 within 256, see SuperScales
#pragma once

#include "simd.h"

// Numbered as in worker/cpu/ops.py.
enum QuantKind {
  kIntegers4,
  kIntegers8,
  kFloats4,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kFloats8,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kIq4,
  kQ2_K,
  kQ3_K,
  kIq4_XS,
  kQuantKinds
};

struct KindTraits {
  int bits, zero_point;
  int super = 0;         // bytes of the scales of 32 columns by 256 k, of kinds that have SuperScales
  int group = 0;         // if it is the same for all weights of the kind
  bool offsets = false;  // whether all weights of the kind have offsets
};
constexpr KindTraits kKinds[kQuantKinds] = {{4, 8},
                                            {8, 128},
                                            {4, 12, 0, 32},
                                            {4, 0, 512, 32, true},
                                            {5, 0, 512, 32, true},
                                            {6, 32, 576, 16},
                                            {8, 0},
                                            {4, 0, 0, 32, true},
                                            {5, 16, 0, 32},
                                            {5, 0, 0, 32, true},
                                            {4, 127, 0, 32},
                                            {2, 0, 640, 16, true},
                                            {3, 4, 448, 16},
                                            {4, 127, 256, 32}};

constexpr int quant_bits(int kind) { return kKinds[kind].bits; }
constexpr int quant_zero_point(int kind) { return kKinds[kind].zero_point; }
constexpr int top_code(int kind) {
  return kind == kFloats4 ? 24 : kind == kIq4 || kind == kIq4_XS ? 240 : (1 << quant_bits(kind)) - 1;
}
// What is subtracted from codes that are multiplied as signed bytes
constexpr int byte_offset(int kind) { return kSignedBytes && top_code(kind) > 127 ? 128 : 0; }
constexpr bool is_super_kind(int kind) { return kKinds[kind].super > 0; }
// Whether scales and offsets are f16 or bf16 per group
constexpr bool has_table_of_halves(int kind) { return !is_super_kind(kind) && kind != kFloats4 && kind != kFloats8; }

struct Quant {
  const uint8_t* data;
  const void* scales;
  const void* offsets;  // may be null
  int kind, group, groups, k_steps;
  int half = 0;    // scales and offsets are f16 instead of bf16
  int narrow = 0;  // products on vector units take activations in 8 bits instead of 16

  int bits() const { return quant_bits(kind); }
  int zero_point() const { return quant_zero_point(kind); }
  long step_bytes() const { return bits() * 256; }
  const uint8_t* step(int nb, int s) const { return data + (long(nb) * k_steps + s) * step_bytes(); }
  long group_at(int nb, int k) const { return (long(nb) * groups + k / group) * 32; }
  // Number of k whose products are added before scales are applied; 256 * 127 * 32767 still fits 32 bits
  int span() const { return group < 256 ? group : 256; }
  // Sixteen scales or offsets of a table of f16 or bf16, or one
  vf sixteen(const void* table, long at) const {
    return half ? load((const f16*)table + at) : load((const bf16*)table + at);
  }
  void put(const void* table, long at, float value) const {
    if (kind == kFloats8) ((float*)table)[at] = value;
    else if (half) store_scalar((f16*)table + at, value);
    else store_scalar((bf16*)table + at, value);
  }
  // The scales of 256 k of a kind with SuperScales
  uint8_t* super(int nb, int s) const { return (uint8_t*)scales + (long(nb) * (k_steps / 4) + s) * kKinds[kind].super; }
};

// --- codes -----------------------------------------------------------------------------------------------------------

// What four bits stand for: 12 + twice the value of a 4-bit float, 127 + the value of kIq4
alignas(16) constexpr uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
alignas(16) constexpr uint8_t kIq4Codes[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
template <int KIND>
constexpr const uint8_t* kCodeTable = KIND == kFloats4                  ? kE2m1Codes
                                      : KIND == kIq4 || KIND == kIq4_XS ? kIq4Codes
                                                                        : nullptr;

template <int I> using At = std::integral_constant<int, I>;

// Calls f(i, codes), i < 4, a compile-time constant: codes are four consecutive k of kLanes columns in bytes, of 16 k.
// `at`: 32 k of a tile (AVX2: of its columns). half: which 16 k of the 32.
template <int KIND, typename F>
__attribute__((always_inline)) inline void codes_of(const uint8_t* at, int half, F&& f) {
  const Ints low = set1_words(0x0f0f);
  // The entries 2 * i and 2 * i + 1, whose lower four bits are the halves of a line
  auto from_halves = [&](const uint8_t* lines, auto&& change) __attribute__((always_inline)) {
    unrolled<2>([&](auto i) __attribute__((always_inline)) {
      const Ints line = load_ints(lines + i * 64);
      f(At<2 * i>(), change(At<2 * i>(), line & low)), f(At<2 * i + 1>(), change(At<2 * i + 1>(), upper_halves(line)));
    });
  };
  if constexpr (quant_bits(KIND) == 8) {
    unrolled<4>([&](auto i) __attribute__((always_inline)) { f(i, load_ints(at + half * 256 + i * 64)); });
  } else if constexpr (quant_bits(KIND) == 4) {
    from_halves(at + half * 128, [](auto, Ints codes) __attribute__((always_inline)) {
      if constexpr (kCodeTable<KIND> != nullptr) return shuffle_bytes(repeat(kCodeTable<KIND>), codes);
      else return codes;
    });
  } else if constexpr (quant_bits(KIND) == 5) {
    const Ints fifth = set1_words(0x1010), high = load_ints(at + 256);
    from_halves(at + half * 128, [&](auto i, Ints codes) __attribute__((always_inline)) {
      const Ints bits = half == 0 ? words_left<4 - i>(high) : i == 0 ? high : words_right<i>(high);
      return or_masked(codes, bits, fifth);
    });
  } else if constexpr (quant_bits(KIND) == 2) {
    const Ints line = load_ints(at + half * 64), two = set1_words(0x0303);
    f(At<0>(), line & two), f(At<1>(), words_right<2>(line) & two), f(At<2>(), words_right<4>(line) & two),
        f(At<3>(), words_right<6>(line) & two);
  } else if constexpr (quant_bits(KIND) == 3) {
    const Ints line = load_ints(at + half * 64), two = set1_words(0x0303), third = set1_words(0x0404);
    const Ints bits = half ? words_right<4>(load_ints(at + 128)) : load_ints(at + 128);
    f(At<0>(), or_masked(line & two, words_left<2>(bits), third)),
        f(At<1>(), or_masked(words_right<2>(line) & two, words_left<1>(bits), third));
    f(At<2>(), or_masked(words_right<4>(line) & two, bits, third)),
        f(At<3>(), or_masked(words_right<6>(line) & two, words_right<1>(bits), third));
  } else {
    const Ints upper = set1_words(0x3030), high = load_ints(at + half * 192 + 128);
    from_halves(at + half * 192, [&](auto i, Ints codes) __attribute__((always_inline)) {
      return or_masked(codes, i == 0 ? words_left<4>(high) : i == 1 ? words_left<2>(high) : i == 2 ? high
                                                                                      : words_right<2>(high), upper);
    });
  }
}

// Calls f with the kind as a compile-time constant.
template <typename F>
inline void of_kind(int kind, F&& f) {
  switch (kind) {
#define QUIRE_KIND(K) case K: return f(std::integral_constant<int, K>());
    QUIRE_KIND(kIntegers4) QUIRE_KIND(kIntegers8) QUIRE_KIND(kFloats4) QUIRE_KIND(kFloats8)
    QUIRE_KIND(kQ4_1) QUIRE_KIND(kQ5_0) QUIRE_KIND(kQ5_1) QUIRE_KIND(kIq4)
    QUIRE_KIND(kQ2_K) QUIRE_KIND(kQ3_K) QUIRE_KIND(kQ4_K) QUIRE_KIND(kQ5_K) QUIRE_KIND(kQ6_K) QUIRE_KIND(kIq4_XS)
#undef QUIRE_KIND
  }
}

// Byte J of each lane, an 8-bit float, as a float. Its exponent's bias is 7, that of a float 127; a number without
// leading one stays one until the product.
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

// The scales and offsets of kLanes columns in 256 k of a kQ4_K weight and the like. In memory, after d and (if there
// are offsets) dmin, f16 [32]: for each tile the bytes that GGUF files describe, four of a column at a time, [bytes /
// 4][16 columns][4]. They are
//     kQ4_K, kQ5_K   eight scales and eight offsets, in twelve bytes
//     kQ2_K          16 bytes, of which the lower half is a scale, the upper half an offset
//     kQ3_K          16 scales in twelve bytes, increased by 32
//     kQ6_K          16 signed scales
//     kIq4_XS        eight scales increased by 32: their lower halves in four bytes; then [16 columns] of their upper
//     two
//                    bits, in two bytes
// scale = d * integer, offset = -dmin * integer.
template <int KIND>
class SuperScales {
 public:
  static constexpr int kGroup = kKinds[KIND].group, kHeads = kKinds[KIND].offsets ? 128 : 64,
                       kTile = (kKinds[KIND].super - kHeads) / 2;
  SuperScales(const uint8_t* super, int column) {
    const uint8_t* tile = super + kHeads + column / 16 * kTile + column % 16 * 4;
    const Ints low = set1_words(0x0f0f), upper = set1_words(0x3030);
    auto dword = [&](int i) { return load_ints(tile + i * 64); };
    d_ = load_floats((const f16*)super + column);
    if constexpr (kKinds[KIND].offsets) dmin_ = load_floats((const f16*)super + 32 + column);
    if constexpr (KIND == kQ6_K) {
      for (int i = 0; i < 4; i++) scales_[i] = dword(i);
    } else if constexpr (KIND == kQ2_K) {
      for (int i = 0; i < 4; i++) scales_[i] = dword(i) & low, offsets_[i] = words_right<4>(dword(i)) & low;
    } else if constexpr (KIND == kQ3_K) {
      const Ints a = dword(0), b = dword(1), c = dword(2), increase = set1_words(0x2020);
      scales_[0] = sub_bytes(or_masked(a & low, words_left<4>(c), upper), increase);
      scales_[1] = sub_bytes(or_masked(b & low, words_left<2>(c), upper), increase);
      scales_[2] = sub_bytes(or_masked(words_right<4>(a) & low, c, upper), increase);
      scales_[3] = sub_bytes(or_masked(words_right<4>(b) & low, words_right<2>(c), upper), increase);
    } else if constexpr (KIND == kIq4_XS) {
      scales_[0] = dword(0), scales_[1] = widen_words(super + kHeads + column / 16 * kTile + 64 + column % 16 * 2);
    } else {
      const Ints a = dword(0), b = dword(1), c = dword(2), six = set1_words(0x3f3f);
      scales_[0] = a & six, scales_[1] = or_masked(c & low, words_right<2>(a), upper);
      offsets_[0] = b & six, offsets_[1] = or_masked(words_right<4>(c) & low, words_right<2>(b), upper);
    }
  }
  // The scale and the offset of group I.
  template <int I> Floats scale() const { return integer<I>() * d_; }
  template <int I> Floats offset() const { return byte<I % 4>(offsets_[I / 4]) * (Floats{} - dmin_); }

 private:
  template <int I> Floats integer() const {
    if constexpr (KIND == kIq4_XS) {
      const Ints upper = I < 2 ? left<I < 2 ? 4 - 2 * I : 0>(scales_[1]) : right<I < 2 ? 0 : 2 * I - 4>(scales_[1]);
      return to_floats(add_ints((right<4 * I>(scales_[0]) & set1_ints(15)) | (upper & set1_ints(48)), set1_ints(-32)));
    } else if constexpr (KIND == kQ3_K || KIND == kQ6_K) {
      return to_floats(signed_right<24>(left<24 - I % 4 * 8>(scales_[I / 4])));
    } else {
      return byte<I % 4>(scales_[I / 4]);
    }
  }
  template <int I>
  static Floats byte(Ints x) {
    return to_floats(I == 3 ? right<24>(x) : right<I * 8>(x) & set1_ints(255));
  }
  Ints scales_[256 / kGroup / 4], offsets_[256 / kGroup / 4];
  Floats d_, dmin_;
};

// 2 ** (exponent - 128) of kLanes exponents: half the scale, for codes that stand for twice the value. Below 2 ** -126
// it is zero.
inline Floats half_power(const uint8_t* exponents) {
  return Floats(left<23>(max_ints(add_ints(widen_bytes(exponents), set1_ints(-1)), set1_ints(0))));
}

// The scale of (code - zero point) and the offset of sixteen columns of tile t, for the 16 k from k on.
struct GroupNumbers { vf scale, offset; };
template <int KIND>
GroupNumbers super_numbers(const Quant& q, int nb, int k, int t) {
  Floats scale[16 / kLanes], offset[16 / kLanes] = {};
  for (int part = 0; part < 16 / kLanes; part++) {
    const SuperScales<KIND> super(q.super(nb, k / 256), t * 16 + part * kLanes);
    unrolled<256 / kKinds[KIND].group>([&](auto i) {
      if (k % 256 / kKinds[KIND].group != i) return;
      scale[part] = super.template scale<i>();
      if constexpr (kKinds[KIND].offsets) offset[part] = super.template offset<i>();
    });
  }
  return {whole(scale), whole(offset)};
}
inline GroupNumbers numbers_of(const Quant& q, int nb, int k, int t) {
  const long at = q.group_at(nb, k) + t * 16;
  if (has_table_of_halves(q.kind)) return {q.sixteen(q.scales, at), q.offsets ? q.sixteen(q.offsets, at) : zero()};
  if (q.kind == kFloats8) return {load((const float*)q.scales + at), zero()};
  GroupNumbers numbers;
  of_kind(q.kind, [&](auto kind) {
    if constexpr (is_super_kind(kind)) numbers = super_numbers<kind>(q, nb, k, t);
  });
  if (is_super_kind(q.kind)) return numbers;
  Floats scale[16 / kLanes];  // kFloats4
  for (int part = 0; part < 16 / kLanes; part++)
    scale[part] = half_power((const uint8_t*)q.scales + at + part * kLanes);
  return {whole(scale), zero()};
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
