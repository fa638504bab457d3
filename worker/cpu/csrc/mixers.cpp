// Mixers with a state in one parallel region: each piece of work takes some channels, or a head, of a request from the
// projections to the result, some tokens at a time, so that what is between stays in cache. The arithmetic is that of
// the kernels for each operation (states.cpp, delta_rows.cpp), bit for bit.
#include "mixers.h"

#include "delta_rows.h"
#include "old_glibc.h"
#include "parallel.h"
#include "recurrent.h"

namespace {

constexpr long kTokens = 32;  // of a request at a time
constexpr long kMinParallel = 1 << 15;  // elements; for fewer, waking other threads costs more than it saves

thread_local Scratch scratch;

// The pages of a convolution before and after the tokens from `t` on of request i.
struct Pages {
  const float* from;
  float* to;
};

Pages conv_pages(const StateMixer& m, const Step& step, long i, long t) {
  const long size = (m.width - 1) * m.channels;
  float* to = m.conv_pages + step.write[i] * size;
  if (t > step.starts[i]) return {to, to};
  return {step.fresh[i] ? nullptr : m.conv_pages + step.read[i] * size, to};
}

// out = x y, of which all are bf16
void multiply(const bf16* x, const bf16* y, bf16* out, long n) {
  long i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(x + i) * load(y + i));
  for (; i < n; i++) store_scalar(out + i, to_float(x[i]) * to_float(y[i]));
}

// The same with y in float32, rounded first.
void multiply_rounded(const bf16* x, const float* y, bf16* out, long n) {
  long i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(x + i) * rounded<bf16>(load(y + i)));
  for (; i < n; i++) store_scalar(out + i, to_float(x[i]) * to_float(to_bf16(y[i])));
}

// C conv(B x) of some channels of request i.
void short_conv(const StateMixer& m, const Step& step, long i, long first, long count, const bf16* x, long ld,
                bf16* out, long ldo) {
  const Convolution conv{m.conv, m.conv_bias, m.channels, m.width, false};
  float* y = (float*)scratch.get(kTokens * count * (sizeof(float) + sizeof(bf16)));
  bf16* inputs = (bf16*)(y + kTokens * count);
  const long end = step.starts[i + 1];
  for (long t = step.starts[i]; t < end; t += kTokens) {
    const long n = std::min(kTokens, end - t);
    const bf16* rows = x + t * ld + first;
    for (long j = 0; j < n; j++) multiply(rows + j * ld, rows + j * ld + 2 * m.channels, inputs + j * count, count);
    const Pages pages = conv_pages(m, step, i, t);
    conv.run(inputs, count, n, first, count, pages.from, pages.to, y, count);
    for (long j = 0; j < n; j++)
      multiply_rounded(rows + j * ld + m.channels, y + j * count, out + (t + j) * ldo + first, count);
  }
}

// A key head of request i with its value heads.
class DeltaHead {
 public:
  DeltaHead(const StateMixer& m, const Step& step, long i, long k_head)
      : m_(m), step_(step), i_(i), k_head_(k_head), conv_{m.conv, m.conv_bias, m.channels, m.width, true} {
    q_ = (float*)scratch.get(kTokens * 2 * (m.dk + m.dv) * sizeof(float));
    k_ = q_ + kTokens * m.dk, v_ = k_ + kTokens * m.dk, o_ = v_ + kTokens * m.dv;
  }

  void run(const bf16* x, long ld, bf16* out, long ldo) {
    const long end = step_.starts[i_ + 1], keys = m_.k_heads * m_.dk, ratio = m_.heads / m_.k_heads;
    for (long t = step_.starts[i_]; t < end; t += kTokens) {
      t_ = t, n_ = std::min(kTokens, end - t), x_ = x + t * ld, ld_ = ld;
      convolve(k_head_ * m_.dk, m_.dk, q_);
      convolve(keys + k_head_ * m_.dk, m_.dk, k_);
      for (long j = 0; j < n_; j++) {
        normalised(q_ + j * m_.dk, q_ + j * m_.dk, 1, m_.dk, 1, m_.query_length);
        normalised(k_ + j * m_.dk, k_ + j * m_.dk, 1, m_.dk, 1, 1.f);
      }
      for (long r = 0; r < ratio; r++)
        value_head(m_.tiled ? r * m_.k_heads + k_head_ : k_head_ * ratio + r, out + t * ldo, ldo);
    }
  }

 private:
  void convolve(long first, long count, float* y) const {
    const Pages pages = conv_pages(m_, step_, i_, t_);
    for (long c = 0; c < count; c += kConvolved)
      conv_.run(x_ + first + c, ld_, n_, first + c, std::min(kConvolved, count - c), pages.from, pages.to, y + c,
                count);
  }

  void value_head(long head, bf16* out, long ldo) {
    const long dk = m_.dk, dv = m_.dv, size = dk * dv, values = 2 * m_.k_heads * dk, first = values + head * dv;
    convolve(first, dv, v_);
    float decays[kTokens], strengths[kTokens];
    for (long j = 0; j < n_; j++) {
      const bf16* gates = x_ + j * ld_ + m_.gates;
      strengths[j] = sigmoid(to_float(gates[head])) * m_.strength;
      decays[j] = std::exp(-std::exp(m_.a_log[head]) * softplus(to_float(gates[m_.heads + head]) + m_.dt_bias[head]));
    }
    float* s = t_ > step_.starts[i_] ? m_.state_pages + (step_.write[i_] * m_.heads + head) * size
                                     : step_.state(m_.state_pages, m_.heads * size, i_, head * size, size);
    const auto pass = [&](auto columns, long e) {
      for (long j = 0; j < n_; j++)
        columns.delta(s + e, dv, dk, [&](long) { return decays[j]; }, k_ + j * dk, q_ + j * dk, strengths[j],
                      v_ + j * dv + e, o_ + j * dv + e);
    };
    n_ == 1 ? by_columns<true>(dv, pass) : by_columns(dv, pass);
    for (long j = 0; j < n_; j++)
      gated_norm_row(o_ + j * dv, x_ + j * ld_ + first + m_.heads * dv, m_.norm, out + j * ldo + head * dv, dv, m_.eps);
  }

  const StateMixer& m_;
  const Step& step_;
  const long i_, k_head_;
  const Convolution conv_;
  float *q_, *k_, *v_, *o_;  // of the tokens t_ : t_ + n_
  long t_ = 0, n_ = 0, ld_ = 0;
  const bf16* x_ = nullptr;  // their projections
};

}  // namespace

extern "C" void quire_mix(const StateMixer* m, const StateStep* step, const bf16* projected, long ld, bf16* out,
                          long ldo) {
  const Step pages{*step};
  const long requests = step->num_requests, tokens = step->starts[requests] - step->starts[0];
  if (m->kind == StateMixer::kShortConv) {
    const long pieces = (m->channels + kConvolved - 1) / kConvolved, all = requests * pieces;
    parallel_for(all, tokens * m->channels < kMinParallel ? all : 1, [&](long piece) {
      const long first = piece % pieces * kConvolved, count = std::min(kConvolved, m->channels - first);
      short_conv(*m, pages, piece / pieces, first, count, projected, ld, out, ldo);
    });
  } else {
    parallel_for(requests * m->k_heads, 1, [&](long piece) {
      DeltaHead(*m, pages, piece / m->k_heads, piece % m->k_heads).run(projected, ld, out, ldo);
    });
  }
}
