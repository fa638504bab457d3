// Decode by AMX tiles, for bf16: one token against at most kSplit keys. A tile product takes 16 rows and 16 columns, and a KV head has far fewer query heads, so
// several KV heads share it: the queries lie side by side, each with zeros for the heads that are not its own, and the sum over the heads is each one's scores.
// K goes from the cache to the tiles as it lies. Each stage brings what the next one reads into L2: scores the values, values the keys of the next task.
#pragma once

#include "amx.h"
#include "attention.h"
#include "attention_tiles.h"

#if QUIRE_AMX

namespace {

struct DecodeTask {
  int token;
  const int* table;
  long h0, h1;      // KV heads; their query heads are at most 16
  long begin, end;  // keys, within one split
  bool keep;        // as a partial result; else this is the end
};

struct DecodeScratch {
  bf16 *q, *p, *v;
  float *s, *o;
  explicit DecodeScratch(char* base, long d) {
    p = (bf16*)base;                // [keys / 32][16 queries][32 keys]
    v = p + kSplit * 16;            // [keys / 32][4][16 pairs of keys][16 d][2]
    s = (float*)(v + kSplit * 64);  // [keys][16 queries]
    o = s + kSplit * 16;            // [4][16 queries][16 d]
    q = (bf16*)(o + 4 * 256);       // [KV heads][d / 32][16 pairs of d][16 queries][2]
  }
  static size_t bytes(long d) { return kSplit * (16 * 2 + 64 * 2 + 16 * 4) + 4 * 1024 + 16 * d * 32; }
};

// The lines of keys [begin, end) of K or V, heads h0 .. h1 - 1, into L2 a few at a time.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const Layer& l, const DecodeTask& t, bool values)
      : table_(t.table), cache_((const char*)(values ? l.v_cache : l.k_cache) + t.h0 * (values ? l.v_head : l.k_head) * 2), block_(2 * (values ? l.v_block : l.k_block)),
        slot_(2 * (values ? l.v_slot : l.k_slot)), head_(2 * (values ? l.v_head : l.k_head)), size_(l.block_size), heads_(t.h1 - t.h0), head_lines_((2 * l.head_dim + 63) / 64), key_(t.begin), end_(t.end) {
    at_key();
  }
  long count() const { return (end_ - key_) * heads_ * head_lines_; }
  void fetch(long lines) {
    for (; lines > 0 && key_ < end_; lines -= head_lines_) {
      for (long i = 0; i < head_lines_; i++) _mm_prefetch(at_ + i * 64, _MM_HINT_T1);
      at_ += head_;
      if (++h_ == heads_) h_ = 0, key_++, at_key();
    }
  }

 private:
  void at_key() {
    if (key_ < end_) at_ = cache_ + table_[key_ / size_] * block_ + key_ % size_ * slot_;
  }
  const int* table_ = nullptr;
  const char *cache_ = nullptr, *at_ = nullptr;
  long block_ = 0, slot_ = 0, head_ = 0, size_ = 1, heads_ = 0, head_lines_ = 1, h_ = 0, key_ = 0, end_ = 0;
};

inline void pack_decode_queries(const Step& s, const DecodeTask& t, bf16* dst) {
  const long d = s.layer.head_dim, g = s.group();
  memset(dst, 0, (t.h1 - t.h0) * d * 32);
  for (long h = t.h0; h < t.h1; h++)
    for (long j = 0; j < g; j++) {
      const uint32_t* q = (const uint32_t*)((const bf16*)s.q + t.token * s.ldq + (h * g + j) * d);
      uint32_t* column = (uint32_t*)dst + (h - t.h0) * d * 8 + (h - t.h0) * g + j;
      for (long pair = 0; pair < d / 2; pair++) memcpy(column + pair * 16, q + pair, 4);
    }
}

// Scores of `tiles` times 16 keys from `key` on: [keys][16].
inline void decode_scores(const Layer& l, const DecodeTask& t, const bf16* q, long key, int tiles, float* s, Ahead& ahead) {
  const long steps = l.head_dim / 32, rounds = (tiles + 3) / 4 * (t.h1 - t.h0) * steps, lines = (ahead.count() + 4 * rounds - 1) / (4 * rounds);
  for (int tile = 0; tile < tiles; tile += 4) {
    const int n = std::min(4, tiles - tile);
    const bf16* k[4];
    for (int i = 0; i < n; i++) {
      const long at = key + (tile + i) * 16;
      k[i] = (const bf16*)l.k_cache + t.table[at / l.block_size] * l.k_block + at % l.block_size * l.k_slot + t.h0 * l.k_head;
    }
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    const bf16* right = q;
    for (long h = 0; h < t.h1 - t.h0; h++)
      for (long c = 0; c < steps; c++, right += kTileElems) {
        const long offset = h * l.k_head + c * 32, stride = l.k_slot * 2;
        TILE_LOAD(6, right, 64);
        TILE_LOAD(4, k[0] + offset, stride); TILE_DP(0, 4, 6); ahead.fetch(lines);
        if (n > 1) { TILE_LOAD(5, k[1] + offset, stride); TILE_DP(1, 5, 6); } ahead.fetch(lines);
        if (n > 2) { TILE_LOAD(4, k[2] + offset, stride); TILE_DP(2, 4, 6); } ahead.fetch(lines);
        if (n > 3) { TILE_LOAD(5, k[3] + offset, stride); TILE_DP(3, 5, 6); } ahead.fetch(lines);
      }
    float* to = s + tile * 256;
    TILE_STORE(0, to, 64);
    if (n > 1) TILE_STORE(1, to + 256, 64);
    if (n > 2) TILE_STORE(2, to + 512, 64);
    if (n > 3) TILE_STORE(3, to + 768, 64);
  }
}

// Scores s of keys lo .. hi - 1 to probabilities p of `steps` times 32 keys, 0 for the others. A lane is a query: its maximum and sum.
inline void decode_softmax(const Layer& l, float* s, int lo, int hi, int steps, bf16* p, vf& m, vf& sum) {
  m = set1(kNegInf), sum = zero();
  for (int j = 0; j < steps * 32; j++) {
    if (j < lo || j >= hi) {
      store(s + j * 16, set1(kUnseen));
      continue;
    }
    vf x = load(s + j * 16);
    x = l.soft_cap > 0 ? tanh(x * set1(l.scale / l.soft_cap)) * set1(l.soft_cap * kLog2e) : x * set1(l.scale * kLog2e);
    m = max(m, x);
    store(s + j * 16, x);
  }
  for (int step = 0; step < steps; step++) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) {
      const float* pair = s + (step * 32 + 2 * i) * 16;
      const vf a = exp2_coarse(load(pair) - m), b = exp2_coarse(load(pair + 16) - m);
      sum = sum + (a + b);
      const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v)), high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b.v));
      r[i] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    transpose_16x16(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(p + step * kTileElems + i * 32, r[i]);
  }
}

// p times columns c0 .. c0 + width - 1 (32 or 64) of the values of KV head h: [width / 16][16 queries][16]. Keys outside [begin, end) count as zeros.
inline void decode_values(const Layer& l, const DecodeTask& t, long h, long key, int steps, const bf16* p, long c0, int width, bf16* v, float* o, Ahead& ahead, long lines) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
  for (int step = 0; step < steps; step++) {
    bf16* block = v + step * 4 * kTileElems;
    for (int j0 = 0; j0 < 32; j0 += 16) {
      const long at = key + step * 32 + j0;
      const bool whole = at >= t.begin && at + 16 <= t.end;
      const bf16* from = at < t.end ? (const bf16*)l.v_cache + t.table[at / l.block_size] * l.v_block + at % l.block_size * l.v_slot + h * l.v_head + c0 : nullptr;
      for (int j = 0; j < 16; j += 2) {
        const bool see_x = whole || (at + j >= t.begin && at + j < t.end), see_y = whole || (at + j + 1 >= t.begin && at + j + 1 < t.end);
        for (int c = 0; c < width; c += 32) {
          const __m512i x = see_x ? _mm512_loadu_si512(from + j * l.v_slot + c) : _mm512_setzero_si512(), y = see_y ? _mm512_loadu_si512(from + (j + 1) * l.v_slot + c) : _mm512_setzero_si512();
          bf16* to = block + c / 16 * kTileElems + (j0 + j) * 16;
          _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
          _mm512_store_si512(to + kTileElems, _mm512_permutex2var_epi16(x, high, y));
        }
      }
      ahead.fetch(lines);
    }
    TILE_LOAD(4, p + step * kTileElems, 64);
    TILE_LOAD(6, block, 64); TILE_DP(0, 4, 6);
    TILE_LOAD(7, block + kTileElems, 64); TILE_DP(1, 4, 7);
    if (width > 32) {
      TILE_LOAD(6, block + 2 * kTileElems, 64); TILE_DP(2, 4, 6);
      TILE_LOAD(7, block + 3 * kTileElems, 64); TILE_DP(3, 4, 7);
    }
  }
  TILE_STORE(0, o, 64); TILE_STORE(1, o + 256, 64);
  if (width > 32) { TILE_STORE(2, o + 512, 64); TILE_STORE(3, o + 768, 64); }
}

// `next`, if any, is what this thread does after this; `slot` where the result goes if it is partial.
inline void attend_decode(const Step& s, const DecodeTask& t, const DecodeTask* next, const Partials& partials, long slot, char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim, g = s.group(), key = t.begin / 16 * 16;
  const int n = int(t.end - key), steps = (n + 31) / 32;
  DecodeScratch f(memory, d);
  pack_decode_queries(s, t, f.q);
  Ahead values(l, t, true), keys = next ? Ahead(l, *next, false) : Ahead();
  decode_scores(l, t, f.q, key, (n + 15) / 16, f.s, values);
  vf m, sum;
  decode_softmax(l, f.s, int(t.begin - key), n, steps, f.p, m, sum);
  alignas(64) float top[16], total[16];
  store(top, m);
  store(total, sum);
  const long rounds = (t.h1 - t.h0) * ((d + 63) / 64) * steps * 2, lines = (keys.count() + rounds - 1) / rounds;
  for (long h = t.h0; h < t.h1; h++)
    for (long c0 = 0; c0 < d; c0 += 64) {
      const int width = int(std::min(64L, d - c0));
      decode_values(l, t, h, key, steps, f.p, c0, width, f.v, f.o, keys, lines);
      for (long j = 0; j < g; j++) {
        const long column = (h - t.h0) * g + j, head = h * g + j;
        const float* row = f.o + column * 16;
        if (!t.keep) {
          const vf inverse = set1(1.f / total[column]);
          for (int c = 0; c < width; c += 16) store((bf16*)s.out + t.token * s.ldo + head * d + c0 + c, load(row + c * 16) * inverse);
          continue;
        }
        const Partial to = partials.at(slot, head);
        for (int c = 0; c < width; c += 16) store(to.acc + c0 + c, load(row + c * 16));
        if (c0 > 0) continue;
        store(to.l, zero());
        *to.l = total[column];
        *to.m = top[column];
      }
    }
}

}  // namespace
#endif
