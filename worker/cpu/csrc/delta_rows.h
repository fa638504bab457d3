// What a gated delta net computes for a token by itself around its state.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

inline float sum_of_squares(const float* x, long n) {
  vf sum = zero();
  long i = 0;
  for (; i + 16 <= n; i += 16) sum = fma(load(x + i), load(x + i), sum);
  float total = reduce_add(sum);
  for (; i < n; i++) total += x[i] * x[i];
  return total;
}

// y = factor x
inline void scaled(const float* x, float* y, long n, float factor) {
  long i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, load(x + i) * set1(factor));
  for (; i < n; i++) y[i] = x[i] * factor;
}

// Heads of x [heads, n], scaled to `length`, `times` times one after the other.
inline void normalised(const float* x, float* y, long heads, long n, long times, float length) {
  for (long h = 0; h < heads; h++) {
    const float factor = length / std::sqrt(sum_of_squares(x + h * n, n) + 1e-6f);
    for (long r = 0; r < times; r++) scaled(x + h * n, y + (r * heads + h) * n, n, factor);
  }
}

inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// out = norm(x) weight silu(z)
template <typename T>
void gated_norm_row(const float* x, const T* z, const float* weight, T* out, long n, float eps) {
  const float factor = 1.f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
  long i = 0;
  for (; i + 16 <= n; i += 16) {
    const vf gate = load(z + i), e = exp_exact(min(max(zero() - gate, set1(-86.f)), set1(86.f)));
    store(out + i, load(weight + i) * (load(x + i) * set1(factor)) * (gate / (set1(1.f) + e)));
  }
  for (; i < n; i++) {
    const float gate = to_float(z[i]);
    store_scalar(out + i, weight[i] * (x[i] * factor) * (gate * sigmoid(gate)));
  }
}

}  // namespace
