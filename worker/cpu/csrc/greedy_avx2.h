// The copy of the output head, the limits that it gives, and logits as always: by AVX2. The copy is a quantized weight (quant.h) but for its scales.
#pragma once

#include "gemm_avx2.h"
#include "greedy.h"

#if !defined(__AVX512F__)

namespace {

// Sixteen columns of a block: their tiles of the copy, and what is to be known of them. False if a weight is not finite.
bool round_columns(const Gemm& g, const Screen& screen, int nb, int tile, const bf16* packed) {
  const vf factor = set1(g.compact ? g.compact->scales[nb] : 1.f);
  auto weights = [&](int k) -> vf {  // of 16 columns
    const bf16* pairs = packed + k / kStep * kStepElems + tile * 512 + k % kStep / 2 * 32;
    const __m256i a = load_pairs(pairs), b = load_pairs(pairs + 16);
    return (k % 2 ? vf{odds(a), odds(b)} : vf{evens(a), evens(b)}) * factor;
  };
  vf top = zero(), rounded = zero(), away = zero(), all = zero();
  for (int k = 0; k < g.k; k++) top = max(top, max(weights(k), zero() - weights(k)));
  const vf scale = top * set1(1.f / 127), inverse = set1(1) / max(scale, set1(1e-30f));
  for (int k = 0; k < g.k; k += 4) {
    __m256i four[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int i = 0; i < 4; i++) {
      const vf w = weights(k + i), quotient = w * inverse;
      const __m256i q[2] = {_mm256_cvtps_epi32(quotient.a), _mm256_cvtps_epi32(quotient.b)};
      const vf kept = vf{_mm256_cvtepi32_ps(q[0]), _mm256_cvtepi32_ps(q[1])} * scale, rest = w - kept;
      rounded = fma(kept, kept, rounded), away = fma(rest, rest, away), all = fma(w, w, all);
      for (int half = 0; half < 2; half++)
        four[half] = _mm256_or_si256(four[half], _mm256_slli_epi32(_mm256_and_si256(_mm256_add_epi32(q[half], _mm256_set1_epi32(128)), _mm256_set1_epi32(255)), i * 8));
    }
    __m256i* to = (__m256i*)(screen.step(nb, k / 64) + tile * 1024 + k % 64 * 16);
    _mm256_storeu_si256(to, four[0]), _mm256_storeu_si256(to + 1, four[1]);
  }
  float* about = screen.about(nb) + tile * 16;
  store(about, scale), store(about + kCols, root(rounded)), store(about + 2 * kCols, root(away) + root(all) * set1(slack_of(g.k)));
  return std::isfinite(reduce_add(all));
}

// What the logits of each block are at most: limits [blocks][limits_ld(g.m)].
void find_limits(const Gemm& g, const Screen& screen, float* limits) {
  const bf16 one = to_bf16(1.f);
  bf16 ones[kCols];
  std::fill(ones, ones + kCols, one);
  const Quant copy{(const uint8_t*)screen.data, ones, nullptr, 8, 1 << 30, 0, int(screen.k_steps)};  // one group of no size: all share these scales
  Gemm rounded = g;
  rounded.quant = &copy;
  const QuantRows x = quant_rows(rounded, g.m, false);
  float norm[kMostGreedy], away[kMostGreedy];  // of each row as it was, and of what rounding took away
  for (int r = 0; r < g.m; r++) {
    float squares = 0, rest = 0;
    for (int k = 0; k < g.k; k++) {
      const float v = to_float(g.x[r * g.ldx + k]), off = v - float(x.value(r, k)) * x.scale[r * x.runs + k / x.run];
      squares += v * v, rest += off * off;
    }
    norm[r] = std::sqrt(squares), away[r] = std::sqrt(rest);
  }
  over_blocks(g, Pool::get().threads(), kGreedyPiece, [&](auto&& each) {
    each([&](int nb) {
      alignas(64) float y[kMostGreedy * kCols];
      quant_sums<8, 64>(rounded, x, 0, g.m, nb, y);
      const float* about = screen.about(nb);
      for (int r = 0; r < g.m; r++) {
        vf top = set1(kNegInf);
        for (int t = 0; t < kCols; t += 16) {
          const vf margin = fma(load(about + kCols + t), set1(away[r]), load(about + 2 * kCols + t) * set1(norm[r]));
          top = max(top, fma(load(y + r * kCols + t), load(about + t), margin));
        }
        limits[nb * limits_ld(g.m) + r] = reduce_max(top);
      }
    });
  });
}

// Logits of some blocks, as always.
class Logits {
 public:
  explicit Logits(const Gemm& g) : g_(g), x_((float*)rounded_rows.get(Groups::floats(g.k, g.m) * sizeof(float)), g.k, g.m) {
    x_.fill(g.k, [&](int r) { return g.x + r * g.ldx; });
  }
  // Calls f in a thread that is to compute blocks.
  template <typename F>
  void run(F&& f) const { f(); }
  void block(const Gemm& to, int nb) const {
    alignas(64) float sums[kMostGreedy * kCols];
    vector_block(to, x_, 0, g_.m, nb, sums);
  }

 private:
  const Gemm& g_;
  const Groups x_;
};

}  // namespace

#endif
