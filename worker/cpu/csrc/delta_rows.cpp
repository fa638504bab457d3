// What a gated delta net computes for each token by itself around its state: the twins are `delta_inputs` and
// `gated_norm` in worker/layers/states/delta_rule.py.
#include "delta_rows.h"
#include "kernels.h"
#include "old_glibc.h"
#include "parallel.h"

namespace {

constexpr long kMinParallel = 1 << 15;  // elements; for fewer, waking other threads costs more than it saves

template <typename F>
void parallel_rows(long rows, long elements, F&& f) {
  parallel_for(rows, elements < kMinParallel ? rows : std::max(1L, rows / (4L * Pool::get().threads())), f);
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

// x [T, width] *= sigmoid(gate [T, width]), which is rounded first; row strides ldx and ldg.
void quire_sigmoid_gate(bf16* x, long ldx, const bf16* gate, long ldg, long rows, long width) {
  parallel_rows(rows, rows * width, [&](long t) {
    bf16* to = x + t * ldx;
    const bf16* from = gate + t * ldg;
    long i = 0;
    for (; i + 16 <= width; i += 16) {
      const vf e = exp_exact(min(max(zero() - load(from + i), set1(-86.f)), set1(86.f)));
      store(to + i, load(to + i) * rounded<bf16>(set1(1.f) / (set1(1.f) + e)));
    }
    for (; i < width; i++) store_scalar(to + i, to_float(to[i]) * to_float(to_bf16(sigmoid(to_float(from[i])))));
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
