// How tokens pass recurrent states: a causal convolution, the gated delta rule and linear attention, token by token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "mixers.h"
#include "simd.h"

namespace {

constexpr long kMost = 1024;  // entries of a key or value
constexpr long kConvolved = 512;  // channels of a convolution at a time, at most: rows of a page are read in order
constexpr long kWidest = 16;

struct Step : StateStep {
  // The part of `size` floats at `offset` of the page that request i writes, with what it reads.
  float* state(float* pages, long page_size, long i, long offset, long size) const {
    float* to = pages + write[i] * page_size + offset;
    if (fresh[i]) {
      std::fill(to, to + size, 0.f);
    } else if (read[i] != write[i]) {
      memcpy(to, pages + read[i] * page_size + offset, size * sizeof(float));
    }
    return to;
  }
};

// x / (1 + exp(-x)); exp stays finite.
inline vf exact_silu(vf x) { return x / (set1(1.f) + exp_exact(min(max(zero() - x, set1(-86.f)), set1(86.f)))); }

// One token passes some neighbouring columns of a head's state, whose rows are `ld` apart; they stay in L1 from token
// to token, and their sums in registers. `fma` is explicit: the compiler could contract either of two products, and
// not the same one for each N.
template <typename V, int N>
struct Columns {
  // S = decay S; d = strength (v - k S); S += k d; o = q S
  template <typename Decay>
  static void delta(float* s, long ld, long dk, Decay decay, const float* key, const float* query, float strength,
                    const float* value, float* o) {
    V sum[N] = {};
    for (long j = 0; j < dk; j++)
      for (int n = 0; n < N; n++) sum[n] = fma(V(key[j] * decay(j)), V::of(s + j * ld, n), sum[n]);
    for (int n = 0; n < N; n++) sum[n] = V(strength) * (V::of(value, n) - sum[n]);
    update(s, ld, dk, decay, key, query, sum, o);
  }
  // S = kept S + k v; o = q S
  static void linear(float* s, long ld, long dk, float kept, const float* key, const float* query, const float* value,
                     float* o) {
    V added[N];
    for (int n = 0; n < N; n++) added[n] = V::of(value, n);
    update(s, ld, dk, [&](long) { return kept; }, key, query, added, o);
  }

 private:
  template <typename Kept>
  static void update(float* s, long ld, long dk, Kept kept, const float* key, const float* query, const V* added,
                     float* o) {
    V sum[N] = {};
    for (long j = 0; j < dk; j++)
      for (int n = 0; n < N; n++) {
        const V next = fma(V(key[j]), added[n], V(kept(j)) * V::of(s + j * ld, n));
        next.to(s + j * ld, n);
        sum[n] = fma(V(query[j]), next, sum[n]);
      }
    for (int n = 0; n < N; n++) sum[n].to(o, n);
  }
};

struct Sixteen {
  vf x = zero();
  Sixteen() = default;
  Sixteen(vf y) : x(y) {}
  explicit Sixteen(float y) : x(set1(y)) {}
  static Sixteen of(const float* p, int n) { return load(p + 16 * n); }
  void to(float* p, int n) const { store(p + 16 * n, x); }
  Sixteen operator*(Sixteen y) const { return x * y.x; }
  Sixteen operator-(Sixteen y) const { return x - y.x; }
};
inline Sixteen fma(Sixteen x, Sixteen y, Sixteen z) { return fma(x.x, y.x, z.x); }

struct One {
  float x = 0.f;
  One() = default;
  explicit One(float y) : x(y) {}
  static One of(const float* p, int n) { return One(p[n]); }
  void to(float* p, int n) const { p[n] = x; }
  One operator*(One y) const { return One(x * y.x); }
  One operator-(One y) const { return One(x - y.x); }
};
inline One fma(One x, One y, One z) { return One(std::fma(x.x, y.x, z.x)); }

// Calls f(Columns, first column) for all of dv columns. WIDE: 128 columns at once, so that a state that passes a single
// token is read in the order of memory.
template <bool WIDE = false, typename F>
void by_columns(long dv, F&& f) {
  long e = 0;
  if constexpr (WIDE)
    for (; e + 128 <= dv; e += 128) f(Columns<Sixteen, 8>(), e);
  for (; e + 32 <= dv; e += 32) f(Columns<Sixteen, 2>(), e);
  for (; e + 16 <= dv; e += 16) f(Columns<Sixteen, 1>(), e);
  for (; e < dv; e++) f(Columns<One, 1>(), e);
}

inline void exp_all(const float* x, float* y, long n) {
  long j = 0;
  for (; j + 16 <= n; j += 16) store(y + j, exp_exact(max(load(x + j), set1(-86.f))));
  for (; j < n; j++) y[j] = std::exp(x[j]);
}

// Rows of a convolution's input that its next results read, in float32.
template <typename T>
struct Latest;

template <>
struct Latest<float> {
  void add(long t, const float* row, long) { rows_[t % kWidest] = row; }
  const float* row(long t) const { return rows_[t % kWidest]; }

 private:
  const float* rows_[kWidest];
};

template <>
struct Latest<bf16> {
  void add(long t, const bf16* row, long count) {
    float* to = rows_[t % kWidest];
    long c = 0;
    for (; c + 16 <= count; c += 16) store(to + c, load(row + c));
    for (; c < count; c++) to[c] = to_float(row[c]);
  }
  const float* row(long t) const { return rows_[t % kWidest]; }

 private:
  float rows_[kWidest][kConvolved];
};

// The causal convolution of `channels` channels in all, [width, channels] weights.
struct Convolution {
  const float *weight, *bias;  // bias: null for none
  long channels, width;
  bool activated;  // silu follows

  // Computes y [n, count], row stride ldy, from n tokens x [n, count], row stride ld, for the `count` channels from
  // `first` on. from: the page before them, null for zeros; to: the page after them, which may be the same.
  template <typename T>
  void run(const T* x, long ld, long n, long first, long count, const float* from, float* to, float* out,
           long ldo) const {
    float before[kWidest][kConvolved];
    for (long j = 0; j < width - 1; j++) {
      if (!from) std::fill(before[j], before[j] + count, 0.f);
      else memcpy(before[j], from + j * channels + first, count * sizeof(float));
    }
    Latest<T> latest;  // the last rows
    const auto input = [&](long t) { return t < 0 ? before[width - 1 + t] : latest.row(t); };
    const long whole = count / 16 * 16;
    for (long t = 0; t < n; t++) {
      latest.add(t, x + t * ld, count);
      const float* in[kWidest];
      for (long k = 0; k < width; k++) in[k] = input(t - (width - 1) + k);
      float* y = out + t * ldo;
      for (long c = 0; c < whole; c += 16) {
        vf sum = bias ? load(bias + first + c) : zero();
        for (long k = 0; k < width; k++) sum = fma(load(in[k] + c), load(weight + k * channels + first + c), sum);
        store(y + c, activated ? exact_silu(sum) : sum);
      }
      float last[16] = {};
      for (long c = whole; c < count; c++) {
        last[c - whole] = bias ? bias[first + c] : 0.f;
        for (long k = 0; k < width; k++)
          last[c - whole] = std::fma(in[k][c], weight[k * channels + first + c], last[c - whole]);
      }
      if (activated && whole < count) store(last, exact_silu(load(last)));
      std::copy(last, last + (count - whole), y + whole);
    }
    for (long j = 0; j < width - 1; j++)
      memcpy(to + j * channels + first, input(n - (width - 1) + j), count * sizeof(float));
  }
};

}  // namespace
