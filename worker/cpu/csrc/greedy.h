// Code shared by the argmax pre-filters of the output head (greedy_amx.h, greedy_vector.h).
#pragma once

#include "gemm_vector.h"

namespace {

constexpr long kGreedyPiece = 4;   // blocks per piece of work

// The 8-bit copy of the output head: [columns / 32][k / 64][2 tiles of 16 columns][16][16 columns][4 k]; signed bytes
// for AMX, else bytes offset by 128.
struct Screen {
  int8_t* data;
  float* columns;  // [columns / 32][scale, norm of rounded weights, norm of rounding errors][32]
  long k_steps;    // steps of 64
  int8_t* step(long nb, long s) const { return data + (nb * k_steps + s) * 2048; }
  float* about(long nb) const { return columns + nb * 3 * kCols; }
};

inline long limits_ld(long rows) { return (rows + 15) / 16 * 16; }  // row stride of the limits, [blocks][rows]

// Returns the share of a column's norm that is added to the norm of its rounding errors. Float32 sums of k products, of
// the copy and of the exact logits, may each be off by k * 2^-24 of the product of the norms; twice that also covers
// errors in these norms.
inline float slack_of(long k) { return float(k) * 0x1p-22f; }

thread_local Scratch rounded_rows;

// Rounds a block of the weight to 8 bits and stores the scale and norms of its columns. Returns false if a weight is
// not finite.
inline bool round_block(const Gemm& g, const Screen& screen, int nb, const bf16* packed) {
  const Floats factor = set1_floats(g.compact ? g.compact->scales[nb] : 1.f);
  bool finite = true;
  for (int c = 0; c < kCols; c += kLanes) {
    auto weights = [&](int k) {
      const Ints pairs = load_ints(packed + tile_place(c) + k / kStep * kStepElems + k % kStep / 2 * 32);
      return (k % 2 ? odds(pairs) : evens(pairs)) * factor;
    };
    Floats top = {}, rounded = {}, away = {}, all = {};
    for (int k = 0; k < g.k; k++) {
      const Floats w = Floats(Ints(weights(k)) & set1_ints(0x7fffffff));
      top = max_floats(top, w);
    }
    const Floats scale = top * set1_floats(1.f / 127), least = set1_floats(1e-30f),
                 inverse = set1_floats(1) / max_floats(scale, least);
    for (int k = 0; k < g.k; k += 4) {
      Ints four = {};
      unrolled<4>([&](auto i) {
        const Floats w = weights(k + i);
        const Ints q = to_ints(w * inverse);
        const Floats kept = to_floats(q) * scale, rest = w - kept;
        rounded = fma(kept, kept, rounded), away = fma(rest, rest, away), all = fma(w, w, all);
        four = four | left<i * 8>(add_ints(q, set1_ints(QUIRE_AMX ? 0 : 128)) & set1_ints(255));
      });
      store_ints(screen.step(nb, k / 64) + c / 16 * 1024 + k % 64 * 16 + c % 16 * 4, four);
    }
    float* about = screen.about(nb) + c;
    store_floats(about, scale), store_floats(about + kCols, root(rounded)),
        store_floats(about + 2 * kCols, root(away) + root(all) * set1_floats(slack_of(g.k)));
    for (int i = 0; i < kLanes; i++) finite &= std::isfinite(all[i]);
  }
  return finite;
}

}  // namespace
