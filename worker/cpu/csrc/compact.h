// bf16 weights in 12 bits each, without loss. Nearly all exponents of the weights of 32 outputs fall into a range of 16
// neighbouring values, so 4 bits encode the exponent, in addition to sign and mantissa. The few other weights are
// stored in an exception list. (DFloat11, arXiv:2504.11651, shows that exponents of weights carry fewer than 3 bits.)
//
// A k-step of the packed layout (gemm.cpp) is 32 vectors of 32 weights. Four vectors of weights become three vectors of
// 16-bit words:
//     word i, i < 3:   bit 15 sign, bits 7 - 10 exponent, bits 0 - 6 mantissa of weight i
//     bits 11 - 14:    in word 0 the exponent, in word 1 the lower mantissa, in word 2 the sign and the upper mantissa
//                      of weight 3
// so three of four weights need one instruction. Expansion yields weights as if the lowest of the 16 exponents were
// kLow; the sums are multiplied by the missing power of two, which is exact. Exceptions are stored with the same shift.
#pragma once

#include <algorithm>

#include "amx.h"
#include "simd.h"

struct Compact {
  const uint16_t* data;         // [columns / 32][k_steps][8][3][32]
  // Sorted: global k-step index << 32 | place in the packed k-step << 16 | bits; then an end marker
  const uint64_t* exceptions;
  const uint32_t* first;        // [columns / 32]: index of each block's first exception
  const float* scales;          // [columns / 32]: the power of two
  int k_steps;
  const uint8_t* units;         // [columns / 32][runs][32]: the units of gemm_fixed.h; unused with AMX

  static constexpr int kStepWords = 8 * 3 * 32;
  static constexpr int kLow = 112;
  const uint16_t* step(int nb, int s) const { return data + (long(nb) * k_steps + s) * kStepWords; }
  const uint64_t* exceptions_from(int nb, int s) const {  // exceptions from k-step s of block nb on
    const uint64_t* e = exceptions + first[nb];
    while (*e >> 32 < uint64_t(nb) * k_steps + s) e++;
    return e;
  }
};

// Expands one register of each of three vectors of words to one register of each of four vectors of weights.
static inline void expand_part(const uint16_t* src, Ints* weights) {
  const Ints keep = set1_words(0x87ff), low = set1_words(Compact::kLow << 7), a = load_ints(src),
             b = load_ints(src + 32), c = load_ints(src + 64);
  weights[0] = or_masked(low, a, keep), weights[1] = or_masked(low, b, keep), weights[2] = or_masked(low, c, keep);
  const Ints lower =
      or_masked(or_masked(low, words_right<4>(a), set1_words(0x0780)), words_right<11>(b), set1_words(0x000f));
  weights[3] = or_masked(or_masked(lower, words_right<7>(c), set1_words(0x0070)), words_left<1>(c), set1_words(0x8000));
}
// Expands three vectors of words to four vectors of weights.
static inline void expand_group(const uint16_t* src, bf16* dst) {
  for (int half = 0; half < 32; half += 2 * kLanes) {
    Ints weights[4];
    expand_part(src + half, weights);
    for (int i = 0; i < 4; i++) store_ints(dst + i * 32 + half, weights[i]);
  }
}

// Expands k-step s of block nb to the packed layout, without the power of two; dst is aligned to 64 bytes. `next`
// points to the exceptions of this step and is advanced to those of the next. In addition to the weights this reads
// only the exception list, one line of which serves dozens of steps. STREAM: the steps are read in order, from memory.
template <bool STREAM>
static inline void expand_step(const Compact& w, int nb, int s, const uint64_t*& next, bf16* dst) {
  const uint16_t* src = w.step(nb, s);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++, src += 96) {
    if (STREAM) read_ahead(src), read_ahead(src + 32), read_ahead(src + 64);
    expand_group(src, dst + i * 128);
  }
  for (const uint64_t step = uint64_t(nb) * w.k_steps + s; *next >> 32 == step; next++)
    dst[*next >> 16 & 1023].bits = uint16_t(*next);
}

// Returns the lowest of the 16 neighbouring exponents that cover the most weights, estimated from a sample.
static inline int likely_exponents(const bf16* packed, long count) {
  int histogram[256] = {}, best = 1, most = -1, inside = 0;
  for (long i = 0; i < count; i += 13) histogram[packed[i].bits >> 7 & 255]++;
  for (int e = 1; e < 16; e++) inside += histogram[e];
  for (int low = 1; low + 15 < 255; low++) {
    inside += histogram[low + 15];
    if (inside > most) most = inside, best = low;
    inside -= histogram[low];
  }
  return best;
}

// Returns the list entry of a weight outside the block's 16 exponents, or -1 if it cannot be stored (denormal,
// infinite, NaN, or out of range after the shift).
static inline int exception_bits(int bits, int shift) {
  const int exponent = bits >> 7 & 255, shifted = exponent - shift;
  if (!(bits & 0x7fff)) return bits;
  return exponent > 0 && exponent < 255 && shifted > 0 && shifted < 255 ? (bits & 0x807f) | shifted << 7 : -1;
}

static inline bool all_zero(const bf16* packed, long count) {
  uint64_t seen = 0, four;
  for (long i = 0; i < count; i += 4) memcpy(&four, packed + i, 8), seen |= four;
  return seen == 0;
}

// Compacts four vectors of weights to three vectors of words. Calls list(place, bits) for each exception; returns false
// if one cannot be stored.
template <typename F>
static inline bool compact_group(const bf16* packed, int low, uint16_t* data, F&& list) {
  typedef uint16_t Words __attribute__((vector_size(16)));
  for (int part = 0; part < 32; part += 8) {
    Words field[4];
    for (int j = 0; j < 4; j++) {
      Words w;
      memcpy(&w, packed + j * 32 + part, sizeof w);
      const Words code = (w >> 7 & 255) - uint16_t(low), inside = (Words)(code <= 15);
      field[j] = (w & 0x807f) | (inside & code << 7);
      uint64_t both[2];
      memcpy(both, &inside, sizeof both);
      if ((both[0] & both[1]) == ~0ull) continue;
      for (int i = 0; i < 8; i++) {
        if (inside[i]) continue;
        const int place = j * 32 + part + i, bits = exception_bits(packed[place].bits, low - Compact::kLow);
        if (bits < 0) return false;
        list(place, bits);
      }
    }
    const Words last = field[3], nibbles[3] = {last >> 7, last, (last >> 12 & 8) | (last >> 4 & 7)};
    for (int i = 0; i < 3; i++) {
      const Words word = field[i] | (nibbles[i] & 15) << 11;
      memcpy(data + i * 32 + part, &word, sizeof word);
    }
  }
  return true;
}

// Compacts one block of `steps` packed k-steps, the first of which has index `step0`. Returns the number of exceptions,
// or -1 if one cannot be stored.
static inline long compact_block(const bf16* packed, int steps, long step0, uint16_t* data, uint64_t* exceptions,
                                 float* scale) {
  if (all_zero(packed, long(steps) * 1024)) {  // for example spare rows of a vocabulary
    *scale = 0.f;
    memset(data, 0, long(steps) * Compact::kStepWords * 2);
    return 0;
  }
  const int low = likely_exponents(packed, long(steps) * 1024), shift = low - Compact::kLow;
  long count = 0;
  for (int s = 0; s < steps; s++)
    for (int i = 0; i < 8; i++, data += 96) {
      const bool listed = compact_group(packed + (long(s) * 8 + i) * 128, low, data, [&](int place, int bits) {
        exceptions[count++] = uint64_t(step0 + s) << 32 | uint64_t(i * 128 + place) << 16 | uint64_t(bits);
      });
      if (!listed) return -1;
    }
  *scale = std::ldexp(1.f, shift);
  return count;
}

// Returns the two weights, k and k + 1, in lane pair `pair` of vector `v` of a k-step, as two halves of 32 bits; does
// not apply exceptions.
static inline uint32_t expand_pair(const uint16_t* step, int v, int pair) {
  uint32_t word[3];
  for (int i = 0; i < 3; i++) memcpy(word + i, step + v / 4 * 96 + i * 32 + pair * 2, 4);
  const uint32_t low = Compact::kLow << 7 | Compact::kLow << 23;
  if (v % 4 < 3) return (word[v % 4] & 0x87ff87ffu) | low;
  return (word[0] >> 4 & 0x07800780u) | (word[1] >> 11 & 0x000f000fu) | (word[2] >> 7 & 0x00700070u) |
         (word[2] << 1 & 0x80008000u) | low;
}
