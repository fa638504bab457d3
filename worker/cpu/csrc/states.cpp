// Recurrent states of a step's requests: a causal convolution, the gated delta rule, linear attention and the selective
// scan, token by token, so that a result does not depend on how a prompt is cut. Each state is updated in the page that
// the step writes. The twins are in worker/layers/: short_conv.py, delta_rule.py, linear_attention.py,
// selective_scan.py.
#include <algorithm>
#include <cmath>

#include "old_glibc.h"
#include "parallel.h"
#include "recurrent.h"

namespace {

constexpr long kChannels = 64;  // channels that are one piece of work

template <typename T>
void convolve(const T* x, long ld, const Convolution& conv, float* pages, const Step& step, long num_requests,
              float* out) {
  const long wide = num_requests > 1 ? kChannels : kConvolved, channels = conv.channels;
  const long pieces = (channels + wide - 1) / wide, page_size = (conv.width - 1) * channels;
  parallel_for(num_requests * pieces, 1, [&](long piece) {
    const long i = piece / pieces, first = piece % pieces * wide, start = step.starts[i];
    conv.run(x + start * ld + first, ld, step.starts[i + 1] - start, first, std::min(wide, channels - first),
             step.fresh[i] ? nullptr : pages + step.read[i] * page_size, pages + step.write[i] * page_size,
             out + start * channels + first, channels);
  });
}

}  // namespace

extern "C" {

// x [T, channels] with row stride ld, bf16 if `narrow`, weight [width, channels], bias [channels] or null, pages [..,
// width - 1, channels], out [T, channels]; with `activated` the silu of the result.
void quire_causal_conv(const void* x, long ld, const float* weight, const float* bias, float* pages, const long* read,
                       const long* write, const bool* fresh, const int* starts, long num_requests, long channels,
                       long width, bool activated, float* out, bool narrow) {
  const Step step{{read, write, fresh, starts, num_requests}};
  const Convolution conv{weight, bias, channels, width, activated};
  if (narrow) convolve((const bf16*)x, ld, conv, pages, step, num_requests, out);
  else convolve((const float*)x, ld, conv, pages, step, num_requests, out);
}

// q, k [T, k_heads, dk], v [T, heads, dv] with row stride ld_v, g [T, heads, decays] with decays 1 or dk, beta [T,
// heads], pages [.., heads, dk, dv], out [T, heads, dv]. A key head is that of heads / k_heads consecutive heads.
void quire_delta_rule(const float* q, const float* k, const float* v, long ld_v, const float* g, const float* beta,
                      float* pages, const long* read, const long* write, const bool* fresh, const int* starts,
                      long num_requests, long heads, long k_heads, long dk, long dv, long decays, float* out) {
  const Step step{{read, write, fresh, starts, num_requests}};
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
        columns.delta(s + e, dv, dk, [&](long j) { return decay[j]; }, key, query, strength,
                      v + t * ld_v + head * dv + e, out + (t * heads + head) * dv + e);
      }
    });
  });
}

// q, k [T, k_heads, dk] with row strides ld_q and ld_k, v [T, heads, dv], g [T, heads], pages [.., heads, dk, dv], out
// [T, heads, dv]. A key head is that of heads / k_heads consecutive heads.
void quire_linear_attention(const float* q, long ld_q, const float* k, long ld_k, const float* v, const float* g,
                            float* pages, const long* read, const long* write, const bool* fresh, const int* starts,
                            long num_requests, long heads, long k_heads, long dk, long dv, float* out) {
  const Step step{{read, write, fresh, starts, num_requests}};
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
  const Step step{{read, write, fresh, starts, num_requests}};
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
