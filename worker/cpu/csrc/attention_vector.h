// Attention by vectors: one token (decode) or a few against tiles of 16 keys, for any type and any CPU. All query heads of a KV head are rows of one small
// problem, so K and V are read once; the KV heads of 16 keys are walked before the next keys, which reads the cache almost front to back.
#pragma once

#include "attention.h"

namespace {

constexpr int kTile = 16;          // keys scored together: one vector of scores per row
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
      const long at = std::min(std::max(key + j, begin), end - 1);
      k[j] = l.k_place(table, at);
      v[j] = l.v_place(table, at);
    }
  }
};

// A running softmax over rows: maximum, sum and weighted values so far.
struct State {
  float *m, *l, *acc;
  static size_t floats(long rows, long d) { return (rows * (d + 2) + 15) / 16 * 16; }  // what lies behind is aligned, too
  State(float* p, long rows) : m(p), l(p + rows), acc(p + 2 * rows) {}
  void clear(long rows, long d) {
    std::fill(m, m + rows, kNegInf);
    std::fill(l, l + rows, 0.f);
    std::fill(acc, acc + rows * d, 0.f);
  }
};

// The softmax of a row goes on: x, the products of its query with 16 V keys, become weights beside the largest of all so far, m, and `sum` is theirs. Keys outside
// [lo, hi) have none. Returns the factor of what was summed before.
template <int V>
inline float weigh(const Layer& l, float* x, long lo, long hi, float& m, float& sum) {
  const int first = int(std::min(lo, 16L * V)), last = int(std::max(hi, 0L));
  vf v[V], top = set1(kNegInf);
  auto masked = [&](int i) { return first > 16 * i || last < 16 * i + 16; };
  for (int i = 0; i < V; i++) {
    v[i] = load(x + 16 * i);
    v[i] = l.soft_cap > 0 ? tanh(v[i] * set1(l.scale / l.soft_cap)) * set1(l.soft_cap * kLog2e) : v[i] * set1(l.scale * kLog2e);
    if (masked(i)) v[i] = select_range(v[i], first - 16 * i, last - 16 * i, set1(kNegInf));
    top = max(top, v[i]);
  }
  const float before = m, now = std::max(before, reduce_max(top));
  if (std::isinf(now)) {  // no key so far; or products that overflow, of which nothing finite may come
    for (int i = 0; i < V; i++) store(x + 16 * i, zero());
    if (now < 0) return 1.f;
    m = now;
    return sum = std::numeric_limits<float>::quiet_NaN();
  }
  vf total = zero();
  for (int i = 0; i < V; i++) {
    v[i] = exp2(v[i] - set1(now));
    store(x + 16 * i, v[i]);
    total = total + v[i];
  }
  const float correction = before == now ? 1.f : std::exp2(before - now);
  m = now;
  sum = sum * correction + reduce_add(total);
  return correction;
}

// Keys and values that are wanted next.
template <typename T>
struct Ahead {
  const T *k[kTile], *v[kTile];
  static void fetch(const T* row, long d) {
    for (long b = 0; b < d * long(sizeof(T)); b += 64) _mm_prefetch((const char*)row + b, _MM_HINT_T0);
  }
};

// How attend_vector computes, for any type on any CPU.
template <typename T>
struct AnyRows {
  static constexpr int kRows = ::kRows;
  const Step& s;
  const int* tokens;
  AnyRows(const Step& s, const int* tokens, int, long, long, char*) : s(s), tokens(tokens) {}
  const T* query(long h, int row) const { return (const T*)s.q + tokens[row / s.group()] * s.ldq + (h * s.group() + row % s.group()) * s.layer.head_dim; }
  static void dot(int n, const T* const* q, const T* const* k, long d, float (*x)[kTile], const Ahead<T>* ahead) {
    if (ahead) for (int j = 0; j < kTile; j++) ahead->fetch(ahead->k[j], d), ahead->fetch(ahead->v[j], d);
    for (int r = 0; r < n; r++) store(x[r], dot_keys<T>(q[r], k, d));
  }
  static void add(int n, const float (*p)[kTile], const float* correction, const T* const* v, int lo, int hi, float* acc, long d, const Ahead<T>*) {
    add_values(n, p, correction, v, lo, hi, acc, d);
  }
  static void finish(float*, long) {}
};

// `count` tokens, KV heads h0 .. h1 - 1, keys [begin, end) of `table`: into state, whose rows are ordered (head, token, query head). `memory`: room for the Way.
template <typename T, typename Way>
void attend_vector(const Step& s, const int* table, const int* tokens, int count, long h0, long h1, long begin, long end, State state, char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim;
  const int rows = count * s.group();
  const T *kc = (const T*)l.k_cache, *vc = (const T*)l.v_cache;
  const Way way(s, tokens, rows, h0, h1, memory);
  Tile tile, next;
  next.locate(l, table, begin / kTile * kTile, begin, end);
  for (long key = begin / kTile * kTile; key < end; key += kTile) {
    tile = next;
    if (key + kTile < end) next.locate(l, table, key + kTile, begin, end);
    const int lo = int(std::max(0L, begin - key)), hi = int(std::min(long(kTile), end - key));
    for (long h = h0; h < h1; h++) {
      const T *k[kTile], *v[kTile];
      const bool wrap = h + 1 == h1;
      const Tile& following = wrap ? next : tile;
      const long following_head = wrap ? h0 : h + 1;
      Ahead<T> ahead;
      for (int j = 0; j < kTile; j++) {
        k[j] = kc + tile.k[j] + h * l.k_head;
        v[j] = vc + tile.v[j] + h * l.v_head;
        ahead.k[j] = kc + following.k[j] + following_head * l.k_head;
        ahead.v[j] = vc + following.v[j] + following_head * l.v_head;
      }
      for (int r0 = 0; r0 < rows; r0 += Way::kRows) {
        const int n = std::min(Way::kRows, rows - r0);
        const long state_row = (h - h0) * rows + r0;
        alignas(64) float p[Way::kRows][kTile];
        float correction[Way::kRows];
        decltype(way.query(h, 0)) q[Way::kRows];
        for (int r = 0; r < n; r++) q[r] = way.query(h, r0 + r);
        const Ahead<T>* once = r0 == 0 ? &ahead : nullptr;
        way.dot(n, q, k, d, p, once);
        for (int r = 0; r < n; r++) {
          const long position = s.position[tokens[(r0 + r) / s.group()]];
          correction[r] = weigh<1>(l, p[r], std::max(long(lo), s.first_key(position) - key), std::min(long(hi), position + 1 - key), state.m[state_row + r], state.l[state_row + r]);
        }
        way.add(n, p, correction, v, lo, hi, state.acc + state_row * d, d, once);
      }
    }
  }
  for (long r = 0; r < (h1 - h0) * rows; r++) way.finish(state.acc + r * d, d);
}

}  // namespace
