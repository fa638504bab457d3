// Causal attention over a paged KV cache, for decode, prefill, chunks of it, and any mixture in one call. Keys and values are read where they lie.
//
// The vector path takes one token (decode) or a few at a time against tiles of 16 keys; all query heads of a KV head are rows of one small problem, so
// K and V are read once. A decode task walks all KV heads of a block before the next block, which reads the cache almost front to back.
// The AMX path (bf16, prefill) is blocked flash attention (https://arxiv.org/abs/2205.14135): 128 keys at a time are rearranged into tiles and used by
// up to 256 rows (tokens x query heads of one KV head).
//
// Key ranges start at absolute multiples of a fixed size and partial results merge in order, so neither the batch nor the number of threads changes
// a token's result.
#include <algorithm>
#include <vector>

#include "amx.h"
#include "parallel.h"
#include "simd.h"

namespace {

struct Layer {  // what stays the same from step to step; strides in elements
  const void* k_cache;
  const void* v_cache;
  long k_block, k_slot, k_head, v_block, v_slot, v_head;
  long num_heads, num_kv_heads, head_dim, block_size, dtype, window;
  float scale, soft_cap;
};

struct Step {
  const Layer& layer;
  const void* q;
  void* out;
  long ldq, ldo;
  const int* block_table;
  long ld_table;
  const int* seq_lens;
  const int* query_start_loc;
  long num_requests;

  int group() const { return int(layer.num_heads / layer.num_kv_heads); }
  int query_len(long i) const { return query_start_loc[i + 1] - query_start_loc[i]; }
  long position(long i, int token) const { return seq_lens[i] - query_len(i) + token; }
  long first_key(long position) const { return layer.window > 0 ? std::max(0L, position - layer.window + 1) : 0; }
};

constexpr float kLog2e = 1.44269504f;

// --- vector path --------------------------------------------------------------------------------------------------------------------------------------

constexpr int kTile = 16;          // keys scored together: one vector of scores per row
constexpr long kSplit = 256;       // keys of a decode task; longer sequences are merged from several
#if defined(__AVX512F__)
constexpr int kRows = 8;           // rows that share the loads of V
#else
constexpr int kRows = 4;
#endif

#if defined(__AVX512F__)
// Lane j of the result is the sum of v[j].
inline vf sum_each(const __m512* v) {
  __m512 a[8], b[4];
  for (int i = 0; i < 8; i++) a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd))};
}
#endif

// q . k for 16 keys.
template <typename T>
inline vf dot_keys(const T* q, const T* const* k, long d) {
#if defined(__AVX512F__)
  __m512 acc[kTile];
#pragma GCC unroll 16
  for (int j = 0; j < kTile; j++) {
    vf sum = zero();
    for (long i = 0; i < d; i += 16) sum = fma(load(q + i), load(k[j] + i), sum);
    acc[j] = sum.v;
  }
  return sum_each(acc);
#else
  float s[kTile];
  for (int j = 0; j < kTile; j++) {
    vf sum = zero();
    for (long i = 0; i < d; i += 16) sum = fma(load(q + i), load(k[j] + i), sum);
    s[j] = reduce_add(sum);
  }
  return load(s);
#endif
}

#if defined(__AVX512BF16__)
template <>
inline vf dot_keys<bf16>(const bf16* q, const bf16* const* k, long d) {
  __m512 acc[kTile];
#pragma GCC unroll 16
  for (int j = 0; j < kTile; j++) {
    vf sum = zero();
    long i = 0;
    for (; i + 32 <= d; i += 32) sum.v = _mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_loadu_si512(q + i), (__m512bh)_mm512_loadu_si512(k[j] + i));
    if (i < d) sum = fma(load(q + i), load(k[j] + i), sum);
    acc[j] = sum.v;
  }
  return sum_each(acc);
}
#endif

// acc[r] = acc[r] * correction[r] + sum over keys lo..hi-1 of p[r][j] v[j].
template <int N, typename T>
void add_values(const float (*p)[kTile], const float* correction, const T* const* v, int lo, int hi, float* acc, long d) {
  constexpr int W = N <= 2 ? 2 : 1;  // vectors of a row at a time, for enough independent sums
  auto run = [&](long i, auto width) {
    constexpr int w = decltype(width)::value;
    vf sum[N][w];
    for (int r = 0; r < N; r++) for (int c = 0; c < w; c++) sum[r][c] = load(acc + r * d + i + 16 * c) * set1(correction[r]);
    for (int j = lo; j < hi; j++) {
      vf x[w];
      for (int c = 0; c < w; c++) x[c] = load(v[j] + i + 16 * c);
      for (int r = 0; r < N; r++) for (int c = 0; c < w; c++) sum[r][c] = fma(set1(p[r][j]), x[c], sum[r][c]);
    }
    for (int r = 0; r < N; r++) for (int c = 0; c < w; c++) store(acc + r * d + i + 16 * c, sum[r][c]);
  };
  long i = 0;
  for (; i + 16 * W <= d; i += 16 * W) run(i, std::integral_constant<int, W>());
  for (; i < d; i += 16) run(i, std::integral_constant<int, 1>());
}

template <typename T>
void add_values(int n, const float (*p)[kTile], const float* correction, const T* const* v, int lo, int hi, float* acc, long d) {
#if defined(__AVX512F__)
  for (; n >= 8; n -= 8, p += 8, correction += 8, acc += 8 * d) add_values<8>(p, correction, v, lo, hi, acc, d);
#endif
  for (; n >= 4; n -= 4, p += 4, correction += 4, acc += 4 * d) add_values<4>(p, correction, v, lo, hi, acc, d);
  for (; n >= 2; n -= 2, p += 2, correction += 2, acc += 2 * d) add_values<2>(p, correction, v, lo, hi, acc, d);
  if (n) add_values<1>(p, correction, v, lo, hi, acc, d);
}

// Where 16 consecutive keys lie, relative to head 0: the offsets of those in [key, end), the others repeat a valid one.
struct Tile {
  long k[kTile], v[kTile];
  void locate(const Layer& l, const int* table, long key, long begin, long end) {
    for (int j = 0; j < kTile; j++) {
      long at = std::min(std::max(key + j, begin), end - 1), block = table[at / l.block_size], offset = at % l.block_size;
      k[j] = block * l.k_block + offset * l.k_slot;
      v[j] = block * l.v_block + offset * l.v_slot;
    }
  }
};

// A running softmax over rows: maximum, sum and weighted values so far.
struct State {
  float *m, *l, *acc;
  static size_t floats(long rows, long d) { return rows * (d + 2); }
  State(float* p, long rows) : m(p), l(p + rows), acc(p + 2 * rows) {}
  void clear(long rows, long d) {
    std::fill(m, m + rows, kNegInf);
    std::fill(l, l + rows, 0.f);
    std::fill(acc, acc + rows * d, 0.f);
  }
};

// Tokens token0 .. token0 + tokens - 1 of request i, KV heads h0 .. h1 - 1, keys [begin, end): into state, whose rows are ordered (head, token, query head).
template <typename T>
void attend_vector(const Step& s, long i, int token0, int tokens, long h0, long h1, long begin, long end, State state) {
  const Layer& l = s.layer;
  const long d = l.head_dim;
  const int g = s.group(), rows = tokens * g;
  const int* table = s.block_table + i * s.ld_table;
  const float scale = l.scale * kLog2e;
  const T *kc = (const T*)l.k_cache, *vc = (const T*)l.v_cache;
  const T* q = (const T*)s.q + (s.query_start_loc[i] + token0) * s.ldq;
  Tile tile, next;
  next.locate(l, table, begin / kTile * kTile, begin, end);
  for (long key = begin / kTile * kTile; key < end; key += kTile) {
    tile = next;
    if (key + kTile < end) next.locate(l, table, key + kTile, begin, end);
    const int lo = int(std::max(0L, begin - key)), hi = int(std::min(long(kTile), end - key));
    for (long h = h0; h < h1; h++) {
      const T *k[kTile], *v[kTile];
      const bool wrap = h + 1 == h1;
      const Tile& ahead = wrap ? next : tile;
      const long ahead_head = wrap ? h0 : h + 1;
      for (int j = 0; j < kTile; j++) {
        k[j] = kc + tile.k[j] + h * l.k_head;
        v[j] = vc + tile.v[j] + h * l.v_head;
        const char *nk = (const char*)(kc + ahead.k[j] + ahead_head * l.k_head), *nv = (const char*)(vc + ahead.v[j] + ahead_head * l.v_head);
        for (long b = 0; b < d * long(sizeof(T)); b += 64) _mm_prefetch(nk + b, _MM_HINT_T0), _mm_prefetch(nv + b, _MM_HINT_T0);
      }
      for (int r0 = 0; r0 < rows; r0 += kRows) {
        const int n = std::min(kRows, rows - r0);
        alignas(64) float p[kRows][kTile];
        float correction[kRows];
        for (int r = 0; r < n; r++) {
          const int token = (r0 + r) / g, head = (r0 + r) % g;
          const long state_row = (h - h0) * rows + r0 + r, position = s.position(i, token0 + token);
          const int row_lo = std::max(lo, int(std::min(long(kTile), s.first_key(position) - key))), row_hi = std::min(hi, int(std::max(-1L, position - key)) + 1);
          vf x = dot_keys<T>(q + token * s.ldq + (h * g + head) * d, k, d);
          x = l.soft_cap > 0 ? tanh(x * set1(l.scale / l.soft_cap)) * set1(l.soft_cap * kLog2e) : x * set1(scale);
          if (row_lo > 0 || row_hi < kTile) x = select_range(x, row_lo, row_hi, set1(kNegInf));
          const float before = state.m[state_row], now = std::max(before, reduce_max(x));
          if (now == kNegInf) {
            correction[r] = 1.f;
            store(p[r], zero());
            continue;
          }
          x = exp2(x - set1(now));
          correction[r] = std::exp2(before - now);
          state.m[state_row] = now;
          state.l[state_row] = state.l[state_row] * correction[r] + reduce_add(x);
          store(p[r], x);
        }
        add_values(n, p, correction, v, lo, hi, state.acc + ((h - h0) * rows + r0) * d, d);
      }
    }
  }
}

template <typename T>
void write_row(T* out, const float* acc, float l, long d) {
  const vf inverse = set1(l > 0 ? 1.f / l : 0.f);
  for (long i = 0; i < d; i += 16) store(out + i, load(acc + i) * inverse);
}

// --- AMX path -----------------------------------------------------------------------------------------------------------------------------------------

#if QUIRE_AMX

constexpr int kKeys = 128;         // keys per block
constexpr int kTileElems = 512;    // bf16 of a tile
constexpr float kUnseen = -1e30f;  // a score that softmax turns into 0

// Memory of one task: `rows` rows (a multiple of 32) of head_dim d.
struct FlashScratch {
  bf16 *q, *k, *v, *p;
  float *s, *o, *m, *l;
  FlashScratch(char* base, long rows, long d) {
    auto take = [&](size_t bytes) { char* r = base; base += (bytes + 63) / 64 * 64; return r; };
    q = (bf16*)take(rows * d * 2);
    k = (bf16*)take(kKeys * d * 2);
    v = (bf16*)take(kKeys * d * 2);
    p = (bf16*)take(32 * kKeys * 2);
    s = (float*)take(32 * kKeys * 4);
    o = (float*)take(rows * d * 4);
    m = (float*)take(rows * 4);
    l = (float*)take(rows * 64);
  }
  static size_t bytes(long rows, long d) { return rows * d * 6 + kKeys * d * 4 + 32 * kKeys * 6 + rows * 68 + 1024; }
};

struct FlashTask {
  long request, head;
  int token0, tokens;
};

// Rows of q of one KV head as left operand: [rows / 32][d / 32][2][16][32].
void pack_queries(const Step& s, const FlashTask& t, int rows, bf16* dst) {
  const long d = s.layer.head_dim, steps = d / 32;
  const int g = s.group(), used = t.tokens * g;
  const bf16* q = (const bf16*)s.q + (s.query_start_loc[t.request] + t.token0) * s.ldq + t.head * g * d;
  for (int r = 0; r < rows; r++)
    for (long k = 0; k < steps; k++) {
      __m512i x = r < used ? _mm512_loadu_si512(q + r / g * s.ldq + r % g * d + k * 32) : _mm512_setzero_si512();
      _mm512_store_si512(dst + (r / 32 * steps + k) * 2 * kTileElems + r % 32 * 32, x);
    }
}

// Keys key .. key + n - 1 (n a multiple of 32) as right operands: K^T as [n / 32][d / 32][2][16 pairs of d][16 keys][2], V as [d / 32][n / 32][2][16 pairs of
// keys][16 d][2]. Keys outside [begin, end) become zeros: what lies there may be anything, and 0 * NaN is NaN.
void pack_keys(const Step& s, long request, long head, long key, int n, long begin, long end, bf16* kd, bf16* vd) {
  const Layer& l = s.layer;
  const long steps = l.head_dim / 32;
  const int* table = s.block_table + request * s.ld_table;
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int j0 = 0; j0 < n; j0 += 16) {
    const bf16 *k[16], *v[16];
    for (int j = 0; j < 16; j++) {
      const long at = key + j0 + j;
      k[j] = v[j] = nullptr;
      if (at < begin || at >= end) continue;
      const long block = table[at / l.block_size], offset = at % l.block_size;
      k[j] = (const bf16*)l.k_cache + block * l.k_block + offset * l.k_slot + head * l.k_head;
      v[j] = (const bf16*)l.v_cache + block * l.v_block + offset * l.v_slot + head * l.v_head;
    }
    for (long c = 0; c < steps; c++) {
      __m512i r[16];
      for (int j = 0; j < 16; j++) r[j] = k[j] ? _mm512_loadu_si512(k[j] + c * 32) : _mm512_setzero_si512();
      transpose_16x16(r);
      bf16* dst = kd + ((j0 / 32 * steps + c) * 2 + j0 / 16 % 2) * kTileElems;
      for (int j = 0; j < 16; j++) _mm512_store_si512(dst + j * 32, r[j]);
      dst = vd + (c * (kKeys / 32) + j0 / 32) * 2 * kTileElems + j0 / 16 % 2 * 256;
      for (int j = 0; j < 16; j += 2) {
        __m512i x = v[j] ? _mm512_loadu_si512(v[j] + c * 32) : _mm512_setzero_si512(), y = v[j + 1] ? _mm512_loadu_si512(v[j + 1] + c * 32) : _mm512_setzero_si512();
        _mm512_store_si512(dst + j / 2 * 32, _mm512_permutex2var_epi16(x, low, y));
        _mm512_store_si512(dst + kTileElems + j / 2 * 32, _mm512_permutex2var_epi16(x, high, y));
      }
    }
  }
}

// How far (in powers of two) a row's maximum may rise before its earlier values are rescaled: probabilities up to 2^8 are as exact as those up to 1.
constexpr float kHeadroom = 8;

// One row of scores to probabilities: sees columns [lo, hi) of `columns`. Returns what the row's earlier values must be multiplied by.
inline float softmax_row(const Layer& l, float* s, int columns, long lo, long hi, float* m, float* sum, bf16* p) {
  vf scale = set1(l.scale * kLog2e), top = set1(kNegInf);
  if (l.soft_cap > 0) {
    for (int c = 0; c < columns; c += 16) store(s + c, tanh(load(s + c) * set1(l.scale / l.soft_cap)) * set1(l.soft_cap));
    scale = set1(kLog2e);
  }
  if (lo > 0 || hi < columns)  // what is not seen: finite, and far enough down to become 0
    for (int c = 0; c < columns; c += 16) store(s + c, select_range(load(s + c), int(std::max(lo - c, 0L)), int(std::min(hi - c, 16L)), set1(kUnseen)));
  for (int c = 0; c < columns; c += 16) top = max(top, load(s + c));
  const float highest = reduce_max(top), before = *m;
  if (highest == kUnseen) {
    for (int c = 0; c < columns; c += 16) store(p + c / 32 * 2 * kTileElems + c % 32, zero());
    return 1.f;
  }
  const float now = highest * (l.soft_cap > 0 ? 1.f : l.scale) * kLog2e;
  float correction = 1.f;
  vf total = load(sum);
  if (now > before + kHeadroom) {  // true for the first block: before is -inf
    correction = before == kNegInf ? 0.f : std::exp2(before - now);
    total = total * set1(correction);
    *m = now;
  }
  const vf minus_m = set1(-*m);
  for (int c = 0; c < columns; c += 16) {
    const vf x = exp2_coarse(fma(load(s + c), scale, minus_m));
    total = total + x;
    store(p + c / 32 * 2 * kTileElems + c % 32, x);
  }
  store(sum, total);
  return correction;
}

void attend_flash(const Step& s, const FlashTask& t, char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim, steps = d / 32;
  const int g = s.group(), used = t.tokens * g, rows = (used + 31) / 32 * 32;
  FlashScratch f(memory, rows, d);
  std::fill(f.m, f.m + rows, kNegInf);
  std::fill(f.l, f.l + rows * 16, 0.f);
  pack_queries(s, t, rows, f.q);
  const long begin = s.first_key(s.position(t.request, t.token0)), end = s.position(t.request, t.token0 + t.tokens - 1) + 1;
  std::vector<bool> started(rows / 32);
  for (long key = begin / kKeys * kKeys; key < end; key += kKeys) {
    const int n = int(std::min(long(kKeys), (end - key + 31) / 32 * 32));
    pack_keys(s, t.request, t.head, key, n, begin, end, f.k, f.v);
    for (int r0 = 0; r0 < rows; r0 += 32) {
      const int last = std::min(r0 + 31, used - 1);
      const long low = s.position(t.request, t.token0 + r0 / g), high = s.position(t.request, t.token0 + last / g);
      if (key > high || s.first_key(low) >= key + n) continue;
      const int columns = int(std::min(long(n), (high + 1 - key + 31) / 32 * 32));
      for (int c = 0; c < columns; c += 32) {
        TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
        amx_tiles_2x2(f.q + r0 * d, f.k + c * d, int(steps));
        TILE_STORE(0, f.s + c, kKeys * 4); TILE_STORE(1, f.s + c + 16, kKeys * 4);
        TILE_STORE(2, f.s + 16 * kKeys + c, kKeys * 4); TILE_STORE(3, f.s + 16 * kKeys + c + 16, kKeys * 4);
      }
      float* o = f.o + r0 * d;  // [d / 32][2 x 2 tiles][16][16]
      for (int r = 0; r < 32; r++) {
        const long position = s.position(t.request, t.token0 + std::min(r0 + r, used - 1) / g);
        const float correction = softmax_row(l, f.s + r * kKeys, columns, s.first_key(position) - key, position + 1 - key, f.m + r0 + r, f.l + (r0 + r) * 16, f.p + r * 32);
        if (correction == 1.f || !started[r0 / 32]) continue;
        for (long c = 0; c < steps; c++) {
          float* x = o + c * 1024 + r / 16 * 512 + r % 16 * 16;
          store(x, load(x) * set1(correction));
          store(x + 256, load(x + 256) * set1(correction));
        }
      }
      for (long c = 0; c < steps; c++) {
        float* x = o + c * 1024;
        if (started[r0 / 32]) { TILE_LOAD(0, x, 64); TILE_LOAD(1, x + 256, 64); TILE_LOAD(2, x + 512, 64); TILE_LOAD(3, x + 768, 64); }
        else { TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3); }
        amx_tiles_2x2(f.p, f.v + c * (kKeys / 32) * 2 * kTileElems, columns / 32);
        TILE_STORE(0, x, 64); TILE_STORE(1, x + 256, 64); TILE_STORE(2, x + 512, 64); TILE_STORE(3, x + 768, 64);
      }
      started[r0 / 32] = true;
    }
  }
  for (int r = 0; r < used; r++) {
    bf16* out = (bf16*)s.out + (s.query_start_loc[t.request] + t.token0 + r / g) * s.ldo + (t.head * g + r % g) * d;
    const float sum = reduce_add(load(f.l + r * 16));
    const vf inverse = set1(sum > 0 ? 1.f / sum : 0.f);
    for (long c = 0; c < d; c += 16) store(out + c, load(f.o + r / 32 * 32 * d + c / 32 * 1024 + r % 32 / 16 * 512 + c % 32 / 16 * 256 + r % 16 * 16) * inverse);
  }
}
#endif

// --- tasks --------------------------------------------------------------------------------------------------------------------------------------------

struct VectorTask {
  long request;
  int token0, tokens;
  long h0, h1, begin, end;
  long partial;  // index of its partial result, -1 if it is the whole
};

struct Merge {  // partial results of one token, for KV heads h0 .. h1 - 1, that follow each other
  long request, h0, h1, first;
  int token, count;
};

struct Plan {
  std::vector<VectorTask> vector;
  std::vector<Merge> merges;
  long partials = 0;
#if QUIRE_AMX
  std::vector<FlashTask> flash;
  int flash_rows = 0;
#endif
};

thread_local Scratch memory, partial_memory;

constexpr int kTokensAtOnce = 4;  // of a prefill on the vector path

Plan make_plan(const Step& s, int threads, int path) {
  const Layer& l = s.layer;
  Plan plan;
  [[maybe_unused]] const int g = s.group();
  auto by_flash = [&](long i) {
#if QUIRE_AMX
    return path != 1 && amx_permitted() && l.dtype == 1 && l.head_dim % 32 == 0 && (path == 2 || s.query_len(i) * g >= 8);
#else
    return false;
#endif
  };
  long decode_tasks = 0;
  for (long i = 0; i < s.num_requests; i++) {
    if (s.query_len(i) <= 0 || by_flash(i)) continue;
    const long p = s.seq_lens[i] - 1;
    decode_tasks += s.query_len(i) == 1 ? p / kSplit - s.first_key(p) / kSplit + 1 : (s.query_len(i) + kTokensAtOnce - 1) / kTokensAtOnce;
  }
  const long head_groups = decode_tasks ? std::min(l.num_kv_heads, (4L * threads + decode_tasks - 1) / decode_tasks) : 1;
  const long heads = (l.num_kv_heads + head_groups - 1) / head_groups;
#if QUIRE_AMX
  long flash_rows = 256;
  for (;; flash_rows /= 2) {
    long tasks = 0;
    for (long i = 0; i < s.num_requests; i++) if (by_flash(i)) tasks += (s.query_len(i) * g + flash_rows - 1) / flash_rows * l.num_kv_heads;
    if (!tasks || tasks >= 4L * threads || flash_rows <= 32) break;
  }
  const int flash_tokens = std::max(1, int(flash_rows / g));
  plan.flash_rows = (flash_tokens * g + 31) / 32 * 32;
#endif
  for (long i = 0; i < s.num_requests; i++) {
    const int n = s.query_len(i);
    if (n <= 0) continue;
#if QUIRE_AMX
    if (by_flash(i)) {
      for (int token = (n - 1) / flash_tokens * flash_tokens; token >= 0; token -= flash_tokens)  // those that see most keys first
        for (long h = 0; h < l.num_kv_heads; h++) plan.flash.push_back({i, h, token, std::min(flash_tokens, n - token)});
      continue;
    }
#endif
    for (int token = (n - 1) / kTokensAtOnce * kTokensAtOnce; token >= 0; token -= kTokensAtOnce) {
      const int tokens = std::min(kTokensAtOnce, n - token);
      const long begin = s.first_key(s.position(i, token)), end = s.position(i, token + tokens - 1) + 1;
      const bool split = n == 1 && begin / kSplit != (end - 1) / kSplit;
      for (long h = 0; h < l.num_kv_heads; h += heads) {
        const long h1 = std::min(h + heads, l.num_kv_heads);
        if (!split) {
          plan.vector.push_back({i, token, tokens, h, h1, begin, end, -1});
          continue;
        }
        const long first = plan.partials;
        for (long key = begin / kSplit * kSplit; key < end; key += kSplit)
          plan.vector.push_back({i, token, tokens, h, h1, std::max(key, begin), std::min(key + kSplit, end), plan.partials++});
        plan.merges.push_back({i, h, h1, first, token, int(plan.partials - first)});
      }
    }
  }
  return plan;
}

template <typename T>
void run_vector(const Step& s, const VectorTask& t, float* own, float* partials, size_t partial_floats) {
  const long d = s.layer.head_dim;
  const int g = s.group();
  const long rows = (t.h1 - t.h0) * t.tokens * g;
  State state(t.partial < 0 ? own : partials + t.partial * partial_floats, rows);
  state.clear(rows, d);
  attend_vector<T>(s, t.request, t.token0, t.tokens, t.h0, t.h1, t.begin, t.end, state);
  if (t.partial >= 0) return;
  for (long r = 0; r < rows; r++) {
    const long head = (t.h0 + r / (t.tokens * g)) * g + r % g, token = t.token0 + r % (t.tokens * g) / g;
    write_row((T*)s.out + (s.query_start_loc[t.request] + token) * s.ldo + head * d, state.acc + r * d, state.l[r], d);
  }
}

template <typename T>
void merge(const Step& s, const Merge& t, const float* partials, size_t partial_floats) {
  const long d = s.layer.head_dim, rows = (t.h1 - t.h0) * s.group();
  for (long r = 0; r < rows; r++) {
    float top = kNegInf, sum = 0;
    for (int c = 0; c < t.count; c++) top = std::max(top, State((float*)partials + (t.first + c) * partial_floats, rows).m[r]);
    alignas(64) float acc[512] = {};
    for (int c = 0; c < t.count; c++) {
      State part((float*)partials + (t.first + c) * partial_floats, rows);
      const float w = std::exp2(part.m[r] - top);
      sum += w * part.l[r];
      for (long i = 0; i < d; i += 16) store(acc + i, fma(set1(w), load(part.acc + r * d + i), load(acc + i)));
    }
    write_row((T*)s.out + (s.query_start_loc[t.request] + t.token) * s.ldo + (t.h0 * s.group() + r) * d, acc, sum, d);
  }
}

template <typename T>
void run(const Step& s, int path) {
  const int threads = Pool::get().threads();
  const Plan plan = make_plan(s, threads, path);
  const long d = s.layer.head_dim;
  const size_t partial_floats = (State::floats(s.layer.num_heads, d) + 15) / 16 * 16;
  float* partials = (float*)partial_memory.get(plan.partials * partial_floats * sizeof(float));
  Queue vector(plan.vector.size());
#if QUIRE_AMX
  Queue flash(plan.flash.size());
#endif
  Pool::get().run([&] {
#if QUIRE_AMX
    if (!plan.flash.empty()) {
      TileScope tiles;
      char* own = (char*)memory.get(FlashScratch::bytes(plan.flash_rows, d));
      for (long i; flash.take(i);) attend_flash(s, plan.flash[i], own);
    }
#endif
    float* own = (float*)memory.get(State::floats(s.layer.num_heads * kTokensAtOnce, d) * sizeof(float));
    for (long i; vector.take(i);) run_vector<T>(s, plan.vector[i], own, partials, partial_floats);
  });
  parallel_for(long(plan.merges.size()), 1, [&](long i) { merge<T>(s, plan.merges[i], partials, partial_floats); });
}

}  // namespace

extern "C" {

// q, out: [tokens, num_heads, head_dim], the last two dimensions contiguous. head_dim is a multiple of 16, at most 512 (AMX: of 32).
// path: 0 automatic, 1 vector, 2 AMX for every request.
void quire_paged_attention(const Layer* layer, const void* q, long ldq, void* out, long ldo, const int* block_table, long ld_table, const int* seq_lens,
                           const int* query_start_loc, long num_requests, int path) {
  Step s{*layer, q, out, ldq, ldo, block_table, ld_table, seq_lens, query_start_loc, num_requests};
  if (layer->dtype == 0) run<float>(s, path);
  else if (layer->dtype == 1) run<bf16>(s, path);
  else run<f16>(s, path);
}
}
