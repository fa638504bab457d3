// Recurrent states of a step's requests: a causal convolution, the gated delta rule and linear attention, token by
// token, so that a result does not depend on how a prompt is cut. Each state is updated in the page that the step
// writes. The twins are in worker/layers/: short_conv.py, delta_rule.py, linear_attention.py.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "old_glibc.h"
#include "parallel.h"

namespace {

constexpr long kMost = 1024;  // entries of a key or value
constexpr long kChannels = 64;  // channels of a convolution that are one piece of work
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

}  // namespace

extern "C" {

// x [T, channels] with row stride ld, weight [width, channels], bias [channels] or null, pages [.., width - 1,
// channels], out [T, channels].
void quire_causal_conv(const float* x, long ld, const float* weight, const float* bias, float* pages, const long* read,
                       const long* write, const bool* fresh, const int* starts, long num_requests, long channels,
                       long width, float* out) {
  const Step step{read, write, fresh, starts};
  const long pieces = (channels + kChannels - 1) / kChannels, page_size = (width - 1) * channels;
  parallel_for(num_requests * pieces, 1, [&](long piece) {
    const long i = piece / pieces, first = piece % pieces * kChannels, count = std::min(kChannels, channels - first);
    const long start = step.starts[i], n = step.starts[i + 1] - start;
    float before[kWidest][kChannels] = {};
    if (!step.fresh[i])
      for (long j = 0; j < width - 1; j++)
        memcpy(before[j], pages + step.read[i] * page_size + j * channels + first, count * sizeof(float));
    const auto input = [&](long t) { return t < 0 ? before[width - 1 + t] : x + (start + t) * ld + first; };
    for (long t = 0; t < n; t++) {
      float* y = out + (start + t) * channels + first;
      if (bias) memcpy(y, bias + first, count * sizeof(float));
      else std::fill(y, y + count, 0.f);
      for (long k = 0; k < width; k++) {
        const float *in = input(t - (width - 1) + k), *w = weight + k * channels + first;
        for (long c = 0; c < count; c++) y[c] += in[c] * w[c];
      }
    }
    for (long j = 0; j < width - 1; j++)
      memcpy(pages + step.write[i] * page_size + j * channels + first, input(n - (width - 1) + j),
             count * sizeof(float));
  });
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
    float delta[kMost], decay[kMost];
    for (long t = step.starts[i]; t < step.starts[i + 1]; t++) {
      const float *key = k + (t * k_heads + k_head) * dk, *query = q + (t * k_heads + k_head) * dk,
                  *value = v + t * ld_v + head * dv;
      const float *gates = g + (t * heads + head) * decays, strength = beta[t * heads + head];
      float* o = out + (t * heads + head) * dv;
      for (long j = 0; j < dk; j++) decay[j] = j < decays ? std::exp(gates[j]) : decay[0];
      std::fill(delta, delta + dv, 0.f);
      for (long j = 0; j < dk; j++) {
        const float factor = key[j] * decay[j];
        const float* row = s + j * dv;
        for (long e = 0; e < dv; e++) delta[e] += factor * row[e];
      }
      for (long e = 0; e < dv; e++) delta[e] = strength * (value[e] - delta[e]);
      std::fill(o, o + dv, 0.f);
      for (long j = 0; j < dk; j++) {
        const float kept = decay[j], added = key[j], asked = query[j];
        float* row = s + j * dv;
        for (long e = 0; e < dv; e++) {
          row[e] = kept * row[e] + added * delta[e];
          o[e] += asked * row[e];
        }
      }
    }
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
    for (long t = step.starts[i]; t < step.starts[i + 1]; t++) {
      const float *key = k + t * ld_k + k_head * dk, *query = q + t * ld_q + k_head * dk,
                  *value = v + (t * heads + head) * dv;
      const float kept = std::exp(g[t * heads + head]);
      float* o = out + (t * heads + head) * dv;
      std::fill(o, o + dv, 0.f);
      for (long j = 0; j < dk; j++) {
        const float added = key[j], asked = query[j];
        float* row = s + j * dv;
        for (long e = 0; e < dv; e++) {
          row[e] = kept * row[e] + added * value[e];
          o[e] += asked * row[e];
        }
      }
    }
  });
}
}
