// Packing of codes and their scales into the layout of quant.h.
#pragma once

#include <cmath>

#include "quant.h"

// Returns the source column of packed column j, or -1. With silu_mul, tiles of 16 gate columns and the matching 16 up
// columns alternate.
static inline long source_column(long j, long n, int silu_mul) {
  if (!silu_mul) return j < n ? j : -1;
  long half = n / 2, i = j / 32 * 16 + j % 16;
  return i < half ? (j % 32 < 16 ? i : half + i) : -1;
}

// Adds bit `bit` of four rows of codes to a line, which the first half starts.
static inline void pack_upper(const uint8_t (*rows)[64], int bit, uint8_t* line, int half) {
  for (int j = 0; j < 64; j++) {
    const int upper = (rows[0][j] >> bit & 1) | (rows[1][j] >> bit & 1) << 1 | (rows[2][j] >> bit & 1) << 2 |
                      (rows[3][j] >> bit & 1) << 3;
    line[j] = uint8_t(half ? line[j] | upper << 4 : upper);
  }
}

// Packs rows of codes, [4][64] (16 k), as `codes_of` reads them. at, half: as there.
static inline void pack_codes(int bits, const uint8_t (*rows)[64], uint8_t* at, int half) {
  if (bits == 8) {
    memcpy(at + half * 256, rows, 256);
    return;
  }
  if (bits < 4) {
    for (int j = 0; j < 64; j++)
      at[half * 64 + j] =
          uint8_t((rows[0][j] & 3) | (rows[1][j] & 3) << 2 | (rows[2][j] & 3) << 4 | (rows[3][j] & 3) << 6);
    if (bits == 3) pack_upper(rows, 2, at + 128, half);
    return;
  }
  uint8_t* to = at + half * (bits == 6 ? 192 : 128);
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 64; j++) to[i * 64 + j] = uint8_t((rows[2 * i][j] & 15) | rows[2 * i + 1][j] << 4);
  if (bits == 5) pack_upper(rows, 4, at + 256, half);
  if (bits == 6)
    for (int j = 0; j < 64; j++)
      to[128 + j] = uint8_t(rows[0][j] >> 4 | rows[1][j] >> 4 << 2 | rows[2][j] >> 4 << 4 | rows[3][j] >> 4 << 6);
}

// Packs the codes q[16][64 k_steps] of sixteen columns into tile t of every step of block nb.
static inline void pack_columns(uint8_t* data, int bits, int k_steps, long nb, int t, const uint8_t* q) {
  const long ld = long(k_steps) * 64;
  for (int s = 0; s < k_steps; s++) {
    alignas(64) uint8_t rows[16][64];
#if defined(__AVX512F__)
    __m512i r[16];
    for (int c = 0; c < 16; c++) r[c] = _mm512_loadu_si512(q + c * ld + s * 64);
    transpose_16x16(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(rows[i], r[i]);
#else
    for (int i = 0; i < 16; i++) for (int c = 0; c < 16; c++) memcpy(rows[i] + c * 4, q + c * ld + s * 64 + i * 4, 4);
#endif
    uint8_t* to = data + (nb * k_steps + s) * bits * 256 + t * bits * 128;
    for (int i = 0; i < 4; i++) pack_codes(bits, rows + i * 4, to + i / 2 * bits * 64, i % 2);
  }
}

// Returns the scale, a bf16 value, that quantizes w[0..n) with the least squared error, and writes the values to q. For
// 4 bits it tries scales around the one that maps the largest entry to -8 (which has no opposite), some of which clip
// that entry; 8 bits are fine enough without a search.
static inline float quantize_group(const float* w, int n, int bits, int8_t* q) {
  vf tops = zero();
  for (int i = 0; i < n; i += 16) tops = max(tops, max(load(w + i), zero() - load(w + i)));
  const float size = reduce_max(tops);
  int first = 0;  // first entry of that size; its sign matters
  while (std::fabs(w[first]) < size) first++;
  const float top = w[first];
  float best = 0;
  const vf lo = set1(bits == 8 ? -127.f : -8.f), hi = set1(bits == 8 ? 127.f : 7.f);
  auto rounded_to = [&](vf quotient) { return min(max(nearest(quotient), lo), hi); };
  if (std::fabs(top) >= 1e-30f) {
    best = to_float(to_bf16(bits == 8 ? std::fabs(top) / 127.f : -top / 8.f));
    auto error_of = [&](float scale) {
      vf sum = zero();
      for (int i = 0; i < n; i += 16) {
        const vf e = load(w + i) - rounded_to(load(w + i) * set1(1.f / scale)) * set1(scale);
        sum = fma(e, e, sum);
      }
      return reduce_add(sum);
    };
    float fewest = bits == 4 ? error_of(best) : 0.f;
    for (int c = 0; bits == 4 && c < 14; c++) {
      const float scale = to_float(to_bf16(-top / (6.5f + 0.25f * float(c)))), error = error_of(scale);
      if (error < fewest) fewest = error, best = scale;
    }
  }
  for (int i = 0; i < n; i += 16) store_bytes(q + i, best == 0 ? zero() : rounded_to(load(w + i) / set1(best)));
  return best;
}
