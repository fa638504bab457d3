// What a gated delta net computes for each token by itself around its state: the twins are `delta_inputs` and
// `gated_norm` in worker/layers/states/delta_rule.py.
#include <cmath>

#include "kernels.h"
#include "old_glibc.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr long kMinParallel = 1 << 15;  // elements; for fewer, waking other threads costs more than it saves

template <typename F>
void parallel_rows(long rows, long elements, F&& f) {
  parallel_for(rows, elements < kMinParallel ? rows : std::max(1L, rows / (4L * Pool::get().threads())), f);
}

float sum_of_squares(const float* x, long n) {
  vf sum = zero();
  long i = 0;
  for (; i + 16 <= n; i += 16) sum = fma(load(x + i), load(x + i), sum);
  float total = reduce_add(sum);
  for (; i < n; i++) total += x[i] * x[i];
  return total;
}

// y = factor x
void scaled(const float* x, float* y, long n, float factor) {
  long i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, load(x + i) * set1(factor));
  for (; i < n; i++) y[i] = x[i] * factor;
}

// Heads of x [heads, n], scaled to `length`, `times` times one after the other.
void normalised(const float* x, float* y, long heads, long n, long times, float length) {
  for (long h = 0; h < heads; h++) {
    const float factor = length / std::sqrt(sum_of_squares(x + h * n, n) + 1e-6f);
    for (long r = 0; r < times; r++) scaled(x + h * n, y + (r * heads + h) * n, n, factor);
  }
}

float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

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

extern "C" {

// x [T, 2 keys + ..] with row stride ld: q and k before their scaling; gates [T, 2 heads], a_log and dt_bias [heads];
// q, k [T, times k_heads, dk], g and beta [T, heads].
void quire_delta_inputs(const float* x, long ld, const float* gates, const float* a_log, const float* dt_bias,
                        long rows, long k_heads, long dk, long heads, long times, float q_length, float strength,
                        float* q, float* k, float* g, float* beta) {
  const long keys = k_heads * dk;
  parallel_rows(rows, rows * keys * 2, [&](long t) {
    normalised(x + t * ld, q + t * times * keys, k_heads, dk, times, q_length);
    normalised(x + t * ld + keys, k + t * times * keys, k_heads, dk, times, 1.f);
    for (long h = 0; h < heads; h++) {
      beta[t * heads + h] = sigmoid(gates[t * 2 * heads + h]) * strength;
      g[t * heads + h] = -std::exp(a_log[h]) * softplus(gates[(t * 2 + 1) * heads + h] + dt_bias[h]);
    }
  });
}

// x [T, heads, n], z [T, ..] with row stride ldz, weight [n], out [T, heads, n].
void quire_gated_norm(const float* x, const void* z, long ldz, const float* weight, void* out, long rows, long heads,
                      long n, float eps, int dtype) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    parallel_rows(rows, rows * heads * n, [&](long t) {
      for (long h = 0; h < heads; h++)
        gated_norm_row(x + (t * heads + h) * n, (const T*)z + t * ldz + h * n, weight, (T*)out + (t * heads + h) * n, n,
                       eps);
    });
  };
  dtype == 0 ? run(float()) : dtype == 1 ? run(bf16()) : run(f16());
}
}
