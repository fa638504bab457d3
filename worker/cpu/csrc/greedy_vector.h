// Logit bounds from the 8-bit copy of the output head, and exact logits of single blocks, on vector units. The copy is
// a quantized weight (quant.h) with separate scales.
#pragma once

#include "gemm_vector.h"
#include "greedy.h"

#if !QUIRE_AMX

namespace {

// Computes an upper bound of the logits of each block: limits [blocks][limits_ld(g.m)].
void find_limits(const Gemm& g, const Screen& screen, float* limits) {
  const bf16 one = to_bf16(1.f);
  bf16 ones[kCols];
  std::fill(ones, ones + kCols, one);
  // One group for all of k; group stride 0, so all blocks share these scales
  const Quant copy{(const uint8_t*)screen.data, ones, nullptr, kIntegers8, 1 << 30, 0, int(screen.k_steps)};
  const IntegerRows x(rounded_rows.get(IntegerRows::bytes(g.m, copy)), g.m, copy);
  x.fill(g.k, [&](int r) { return g.x + r * g.ldx; });
  const QuantBlock multiply = quant_block_of(copy);
  float norm[kMostGreedy], away[kMostGreedy];  // norms of each original row and of its rounding errors
  for (int r = 0; r < g.m; r++) {
    float squares = 0, rest = 0;
    for (int k = 0; k < g.k; k++) {
      const float v = to_float(g.x[r * g.ldx + k]), off = v - float(x.value(r, k)) * x.scale(r, k);
      squares += v * v, rest += off * off;
    }
    norm[r] = std::sqrt(squares), away[r] = std::sqrt(rest);
  }
  over_blocks(g, Pool::get().threads(), kGreedyPiece, [&](auto&& each) {
    each([&](int nb) {
      alignas(64) float y[kMostGreedy * kCols];
      multiply(copy, x, nb, y);
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

// Computes exact logits of single blocks, by the same code as for all logits.
class Logits {
 public:
  explicit Logits(const Gemm& g) : g_(g), x_((float*)rounded_rows.get(Groups::floats(g.k, g.m) * sizeof(float)), g.k, g.m) {
    x_.fill(g.k, [&](int r) { return g.x + r * g.ldx; });
  }
  // Calls f in a thread that computes blocks; no setup is needed.
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
