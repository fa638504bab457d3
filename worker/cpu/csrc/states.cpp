// Recurrent states of a step's requests: a causal convolution, the gated delta rule, linear attention and the selective
// scan, token by token, so that a result does not depend on how a prompt is cut. Each state is updated in the page that
// the step writes. The twins are in worker/layers/: short_conv.py, delta_rule.py, linear_attention.py,
// selective_scan.py.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "old_glibc.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr long kMost = 1024;  // entries of a key or value
constexpr long kChannels = 64;  // channels that are one piece of work
constexpr long kConvolved = 512;  // the same, of the convolution of a prompt: rows of a page are read in order
constexpr long kWidest = 16;

// The requests of a step: request i has tokens starts[i] : starts[i + 1], reads page read[i] unless it is fresh, and
// writes page write[i].
struct Step {
  const long *read, *write;
  const bool* fresh;
  const int* starts;

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
vf exact_silu(vf x) { return x / (set1(1.f) + exp_exact(min(max(zero() - x, set1(-86.f)), set1(86.f)))); }

// One token passes some neighbouring columns of a head's state, whose rows are `ld` apart; they stay in L1 from token
// to token, and their sums in registers.
template <typename V, int N>
struct Columns {
  // S = decay S; d = strength (v - k S); S += k d; o = q S
  static void delta(float* s, long ld, long dk, const float* decay, const float* key, const float* query,
                    float strength, const float* value, float* o) {
    V sum[N] = {};
    for (long j = 0; j < dk; j++)
      for (int n = 0; n < N; n++) sum[n] += V(key[j] * decay[j]) * V::of(s + j * ld, n);
    for (int n = 0; n < N; n++) sum[n] = V(strength) * (V::of(value, n) - sum[n]);
    update(s, ld, dk, [&](long j) { return decay[j]; }, key, query, sum, o);
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
        const V next = V(kept(j)) * V::of(s + j * ld, n) + V(key[j]) * added[n];
        next.to(s + j * ld, n);
        sum[n] += V(query[j]) * next;
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
  Sixteen operator+(Sixteen y) const { return x + y.x; }
  Sixteen operator-(Sixteen y) const { return x - y.x; }
  void operator+=(Sixteen y) { x = x + y.x; }
};

struct One {
  float x = 0.f;
  One() = default;
  explicit One(float y) : x(y) {}
  static One of(const float* p, int n) { return One(p[n]); }
  void to(float* p, int n) const { p[n] = x; }
  One operator*(One y) const { return One(x * y.x); }
  One operator+(One y) const { return One(x + y.x); }
  One operator-(One y) const { return One(x - y.x); }
  void operator+=(One y) { x += y.x; }
};

// Calls f(Columns, first column) for all of dv columns.
template <typename F>
void by_columns(long dv, F&& f) {
  long e = 0;
  for (; e + 32 <= dv; e += 32) f(Columns<Sixteen, 2>(), e);
  for (; e + 16 <= dv; e += 16) f(Columns<Sixteen, 1>(), e);
  for (; e < dv; e++) f(Columns<One, 1>(), e);
}

void exp_all(const float* x, float* y, long n) {
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

template <typename T>
void convolve(const T* x, long ld, const float* weight, const float* bias, float* pages, const Step& step,
              long num_requests, long channels, long width, bool activated, float* out) {
  const long wide = num_requests > 1 ? kChannels : kConvolved;
  const long pieces = (channels + wide - 1) / wide, page_size = (width - 1) * channels;
  parallel_for(num_requests * pieces, 1, [&](long piece) {
    const long i = piece / pieces, first = piece % pieces * wide, count = std::min(wide, channels - first);
    const long start = step.starts[i], n = step.starts[i + 1] - start;
    float before[kWidest][kConvolved];
    for (long j = 0; j < width - 1; j++) {
      if (step.fresh[i]) std::fill(before[j], before[j] + count, 0.f);
      else memcpy(before[j], pages + step.read[i] * page_size + j * channels + first, count * sizeof(float));
    }
    Latest<T> latest;  // the chunk's last rows
    const auto input = [&](long t) { return t < 0 ? before[width - 1 + t] : latest.row(t); };
    const long whole = count / 16 * 16;
    for (long t = 0; t < n; t++) {
      latest.add(t, x + (start + t) * ld + first, count);
      const float* in[kWidest];
      for (long k = 0; k < width; k++) in[k] = input(t - (width - 1) + k);
      float* y = out + (start + t) * channels + first;
      for (long c = 0; c < whole; c += 16) {
        vf sum = bias ? load(bias + first + c) : zero();
        for (long k = 0; k < width; k++) sum = fma(load(in[k] + c), load(weight + k * channels + first + c), sum);
        store(y + c, activated ? exact_silu(sum) : sum);
      }
      float last[16] = {};
      for (long c = whole; c < count; c++) {
        last[c - whole] = bias ? bias[first + c] : 0.f;
        for (long k = 0; k < width; k++) last[c - whole] += in[k][c] * weight[k * channels + first + c];
      }
      if (activated && whole < count) store(last, exact_silu(load(last)));
      std::copy(last, last + (count - whole), y + whole);
    }
    for (long j = 0; j < width - 1; j++)
      memcpy(pages + step.write[i] * page_size + j * channels + first, input(n - (width - 1) + j),
             count * sizeof(float));
  });
}

}  // namespace

extern "C" {

// x [T, channels] with row stride ld, bf16 if `narrow`, weight [width, channels], bias [channels] or null, pages [..,
// width - 1, channels], out [T, channels]; with `activated` the silu of the result.
void quire_causal_conv(const void* x, long ld, const float* weight, const float* bias, float* pages, const long* read,
                       const long* write, const bool* fresh, const int* starts, long num_requests, long channels,
                       long width, bool activated, float* out, bool narrow) {
  const Step step{read, write, fresh, starts};
  if (narrow) convolve((const bf16*)x, ld, weight, bias, pages, step, num_requests, channels, width, activated, out);
  else convolve((const float*)x, ld, weight, bias, pages, step, num_requests, channels, width, activated, out);
}

// q, k [T, k_heads, dk], v [T, heads, dv] with row stride ld_v, g [T, heads, decays] with decays 1 or dk, beta [T,
// heads], pages [.., heads, dk, dv], out [T, heads, dv]. A key head is that of heads / k_heads consecutive heads.
void quire_delta_rule(const float* q, const float* k, const float* v, long ld_v, const float* g, const float* beta,
                      float* pages, const long* read, const long* write, const bool* fresh, const int* starts,
                      long num_requests, long heads, long k_heads, long dk, long dv, long decays, float* out) {
  const Step step{read, write, fresh, starts};
  parallel_for(num_requests * heads, 1, [&](long piece) {
    const long i = piece / heads, head = piece % heads, k_head = head / (heads / k_heads), size = dk * dv;
    float* s = step.state(pages, heads * size, i, head * size, size);
    float decay[kMost];
    by_columns(dv, [&](auto columns, long e) {
      for (long t = step.starts[i]; t < step.starts[i + 1]; t++) {
        const float *gates = g + (t * heads + head) * decays, strength = beta[t * heads + head];
        const float *key = k + (t * k_heads + k_head) * dk, *query = q + (t * k_heads + k_head) * dk;
        if (decays == 1) std::fill(decay, decay + dk, std::exp(gates[0]));
        else exp_all(gates, decay, dk);
        columns.delta(s + e, dv, dk, decay, key, query, strength, v + t * ld_v + head * dv + e,
                      out + (t * heads + head) * dv + e);
      }
    });
  });
}

// q, k [T, k_heads, dk] with row strides ld_q and ld_k, v [T, heads, dv], g [T, heads], pages [.., heads, dk, dv], out
// [T, heads, dv]. A key head is that of heads / k_heads consecutive heads.
void quire_linear_attention(const float* q, long ld_q, const float* k, long ld_k, const float* v, const float* g,
                            float* pages, const long* read, const long* write, const bool* fresh, const int* starts,
                            long num_requests, long heads, long k_heads, long dk, long dv, float* out) {
  const Step step{read, write, fresh, starts};
  parallel_for(num_requests * heads, 1, [&](long piece) {
    const long i = piece / heads, head = piece % heads, k_head = head / (heads / k_heads), size = dk * dv;
    float* s = step.state(pages, heads * size, i, head * size, size);
    by_columns(dv, [&](auto columns, long e) {
      for (long t = step.starts[i]; t < step.starts[i + 1]; t++)
        columns.linear(s + e, dv, dk, std::exp(g[t * heads + head]), k + t * ld_k + k_head * dk,
                       q + t * ld_q + k_head * dk, v + (t * heads + head) * dv + e,
                       out + (t * heads + head) * dv + e);
    });
  });
}

// x, dt [T, channels], a [channels, entries], b, c [T, entries] with row strides ld_b and ld_c, pages [.., channels,
// entries], out [T, channels].
void quire_selective_scan(const float* x, const float* dt, const float* a, const float* b, long ld_b, const float* c,
                          long ld_c, float* pages, const long* read, const long* write, const bool* fresh,
                          const int* starts, long num_requests, long channels, long entries, float* out) {
  const Step step{read, write, fresh, starts};
  const long pieces = (channels + kChannels - 1) / kChannels, whole = entries / 16 * 16;
  parallel_for(num_requests * pieces, 1, [&](long piece) {
    const long i = piece / pieces, first = piece % pieces * kChannels, count = std::min(kChannels, channels - first);
    float* states = step.state(pages, channels * entries, i, first * entries, count * entries);
    for (long t = step.starts[i]; t < step.starts[i + 1]; t++) {
      const float *input = b + t * ld_b, *asked = c + t * ld_c;
      for (long j = 0; j < count; j++) {
        const float time = dt[t * channels + first + j], added = time * x[t * channels + first + j];
        const float* rates = a + (first + j) * entries;
        float* h = states + j * entries;
        vf sum = zero();
        for (long n = 0; n < whole; n += 16) {
          const vf kept = exp_exact(max(set1(time) * load(rates + n), set1(-86.f)));
          const vf next = fma(kept, load(h + n), set1(added) * load(input + n));
          store(h + n, next);
          sum = fma(next, load(asked + n), sum);
        }
        float y = reduce_add(sum);
        for (long n = whole; n < entries; n++) {
          h[n] = std::exp(time * rates[n]) * h[n] + added * input[n];
          y += h[n] * asked[n];
        }
        out[t * channels + first + j] = y;
      }
    }
  });
}

// x [T, k] with row stride ld, weight [k, n] and bias [n], out [T, n], of which n is a multiple of 16: a row of the
// result does not depend on the others.
void quire_float_linear(const float* x, long ld, const float* weight, const float* bias, long rows, long k, long n,
                        float* out) {
  const long pieces = (n + kChannels - 1) / kChannels;
  parallel_for(rows * pieces, 1, [&](long piece) {
    const long t = piece % rows, first = piece / rows * kChannels, count = std::min(kChannels, n - first);
    vf sums[kChannels / 16];
    for (long c = 0; c < count; c += 16) sums[c / 16] = load(bias + first + c);
    for (long j = 0; j < k; j++)
      for (long c = 0; c < count; c += 16)
        sums[c / 16] = fma(set1(x[t * ld + j]), load(weight + j * n + first + c), sums[c / 16]);
    for (long c = 0; c < count; c += 16) store(out + t * n + first + c, sums[c / 16]);
  });
}
}
