// Decode attention in bf16 with AMX tiles: one token, at most kSplit keys. The tiles load K and V directly from the
// cache, without copying or repacking, in an order that the hardware prefetcher follows.
//
// Scores: 16 keys are the left operand; the query heads of their KV head are the columns of the right operand.
// Values: the values of 16 keys are the right operand. Its rows hold pairs of elements of one key, but a product needs
// pairs of keys. The left operand therefore has two rows per query: one with a zero after each probability, one with a
// zero before it. These rows yield the even and the odd elements.
#pragma once

#include "amx.h"
#include "attention.h"
#include "attention_tiles.h"

#if QUIRE_AMX

namespace {

struct DecodeScratch {
  bf16 *q, *p, *v;
  float *s, *o;
  explicit DecodeScratch(char* base, long d) {
    p = (bf16*)base;                // [keys / 16][16 queries][even, odd][16 keys][2]
    s = (float*)(p + kSplit * 64);  // [keys][16 queries]; the last tile loads from p extend into s
    o = s + kSplit * 16;            // [4][16 rows][16]
    v = (bf16*)(o + 4 * 256);       // [16 keys][128 d]
    q = v + 16 * 128;                // [KV heads][d / 32][16 pairs of d][query heads per KV head][2]
  }
  static size_t bytes(long d) { return kSplit * (64 * 2 + 16 * 4) + 4 * 1024 + 16 * 128 * 2 + 16 * d * 2; }
};

inline void pack_decode_queries(const Step& s, const Task& t, bf16* dst) {
  const long d = s.layer.head_dim, g = s.group();
  for (long h = t.h0; h < t.h1; h++, dst += g * d)
    for (long j = 0; j < g; j++) {
      const bf16* q = (const bf16*)s.q + *t.tokens * s.ldq + (h * g + j) * d;
      for (long pair = 0; pair < d / 2; pair++) memcpy(dst + (pair * g + j) * 2, q + pair * 2, 4);
    }
}

// Computes the scores s [keys][16] of `tiles` * 16 keys from `key` on.
inline void decode_scores(const Layer& l, const Task& t, const bf16* q, long key, int tiles, float* s) {
  const long g = l.num_heads / l.num_kv_heads, stride = l.k_slot * 2;
  TileScope scope(16, 64, 0, int(g));
  for (int tile = 0; tile < tiles; tile++) {
    const long at = key + tile * 16;
    const bf16* k = (const bf16*)l.k_cache + l.k_place(t.table, at);
    const bf16* right = q;
    for (long h = t.h0; h < t.h1; h++) {
      TILE_ZERO(0);
      for (long c = 0; c < l.head_dim; c += 32, right += 32 * g) {
        TILE_LOAD(4, k + h * l.k_head + c, stride);
        TILE_LOAD(6, right, g * 4);
        TILE_DP(0, 4, 6);
      }
      TILE_STORE(0, s + tile * 256 + (h - t.h0) * g, 64);
    }
  }
}

// Converts the scores s of keys lo .. hi - 1 to probabilities p of `tiles` * 16 keys, 0 outside [lo, hi). Each lane of
// m and sum is the maximum and the sum of one query.
inline void decode_softmax(const Layer& l, float* s, int lo, int hi, int tiles, bf16* p, vf& m, vf& sum) {
  m = set1(kNegInf), sum = zero();
  for (int j = 0; j < tiles * 16; j++) {
    if (j < lo || j >= hi) {
      store(s + j * 16, set1(kUnseen));
      continue;
    }
    vf x = load(s + j * 16);
    x = l.soft_cap > 0 ? tanh(x * set1(l.scale / l.soft_cap)) * set1(l.soft_cap * kLog2e) : x * set1(l.scale * kLog2e);
    m = max(m, x);
    store(s + j * 16, x);
  }
  for (int tile = 0; tile < tiles; tile++) {
    __m512i r[16];
    for (int j = 0; j < 16; j++) {
      const vf x = exp2_coarse(load(s + (tile * 16 + j) * 16) - m);
      sum = sum + x;
      r[j] = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v));
    }
    transpose_16x16(r);
    for (int i = 0; i < 16; i++) {
      _mm512_store_si512(p + (tile * 16 + i) * 64, r[i]);
      _mm512_store_si512(p + (tile * 16 + i) * 64 + 32, _mm512_slli_epi32(r[i], 16));
    }
  }
}

// Computes o [chunk][16 rows][16]: 16 rows of p times columns c0 .. c0 + 32 * chunks - 1 of the values of KV head h.
// Values of keys outside [begin, end) are replaced with zeros: they may be NaN, and 0 * NaN is NaN. Prefetches the
// values of the next head, adjacent in memory, to L2.
inline void decode_values(const Layer& l, const Task& t, long h, long key, int tiles, const bf16* p, long c0,
                          int chunks, bf16* own, float* o) {
  TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
  for (int tile = 0; tile < tiles; tile++) {
    const long at = key + tile * 16, rows = l.v_slot;
    const bf16* v = (const bf16*)l.v_cache + l.v_place(t.table, at) + h * l.v_head + c0;
    if (h + 1 < t.h1)
      for (long j = 0; j < 16; j++)
        for (long c = 0; c < 128; c += 32) prefetch_l2(v + l.v_head + j * rows + c);
    long stride = rows * 2;
    if (at < t.begin || at + 16 > t.end) {
      for (long j = 0; j < 16; j++) {
        if (at + j >= t.begin && at + j < t.end) memcpy(own + j * 128, v + j * rows, chunks * 64);
        else memset(own + j * 128, 0, chunks * 64);
      }
      v = own, stride = 256;
    }
    TILE_LOAD(4, p + tile * 1024, 64);
    TILE_LOAD(6, v, stride); TILE_DP(0, 4, 6);
    if (chunks > 1) { TILE_LOAD(7, v + 32, stride); TILE_DP(1, 4, 7); }
    if (chunks > 2) { TILE_LOAD(6, v + 64, stride); TILE_DP(2, 4, 6); }
    if (chunks > 3) { TILE_LOAD(7, v + 96, stride); TILE_DP(3, 4, 7); }
  }
  TILE_STORE(0, o, 64);
  if (chunks > 1) TILE_STORE(1, o + 256, 64);
  if (chunks > 2) TILE_STORE(2, o + 512, 64);
  if (chunks > 3) TILE_STORE(3, o + 768, 64);
}

// Interleaves 16 even and 16 odd elements, multiplied by `by` (if given), into 32 in order.
inline void store_interleaved(bf16* to, const float* even, const float* odd, vf by) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((load(even) * by).v)),
                high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((load(odd) * by).v));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
inline void store_interleaved(float* to, const float* even, const float* odd) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0),
                high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  store(to, {_mm512_permutex2var_ps(load(even).v, low, load(odd).v)});
  store(to + 16, {_mm512_permutex2var_ps(load(even).v, high, load(odd).v)});
}

// Runs a task of one token with at most kSplit keys and at most 16 query heads.
inline void attend_decode(const Step& s, const Task& t, const Partials& partials, char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim, dv = l.v_dim, g = s.group(), key = t.begin / 16 * 16;
  const int n = int(t.end - key), tiles = (n + 15) / 16;
  DecodeScratch f(memory, d);
  pack_decode_queries(s, t, f.q);
  decode_scores(l, t, f.q, key, tiles, f.s);
  vf m, sum;
  decode_softmax(l, f.s, int(t.begin - key), n, tiles, f.p, m, sum);
  alignas(64) float top[16], total[16];
  store(top, m);
  store(total, sum);
  TileScope scope;
  for (long h = t.h0; h < t.h1; h++)
    for (long c0 = 0; c0 < dv; c0 += 128)
      for (long j = 0; j < g; j++) {  // 16 rows of p hold 8 queries
        const int chunks = int(std::min(128L, dv - c0)) / 32;
        const long column = (h - t.h0) * g + j, head = h * g + j;
        if (j % 8 == 0) decode_values(l, t, h, key, tiles, f.p + column * 64, c0, chunks, f.v, f.o);
        const float* row = f.o + j % 8 * 32;
        if (!t.keep) {
          const vf inverse = set1(1.f / l.with_sink(head, top[column], total[column]));
          for (int c = 0; c < chunks; c++)
            store_interleaved((bf16*)s.out + *t.tokens * s.ldo + head * dv + c0 + c * 32, row + c * 256,
                              row + c * 256 + 16, inverse);
          continue;
        }
        const Partial to = partials.at(t.slot, head);
        for (int c = 0; c < chunks; c++) store_interleaved(to.acc + c0 + c * 32, row + c * 256, row + c * 256 + 16);
        if (c0 > 0) continue;
        store(to.l, zero());
        *to.l = total[column];
        *to.m = top[column];
      }
}

}  // namespace
#endif
