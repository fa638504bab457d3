// Logit bounds from the 8-bit copy of the output head, and exact logits of single blocks, on vector units. The copy is
// a quantized weight (quant.h) with separate scales.
#pragma once

#include "gemm_vector.h"
#include "greedy.h"

#if !QUIRE_AMX

namespace {

#if defined(__AVX512F__)
constexpr int kCoarseRows = 3;  // from so many rows on, products of both bytes take longer than reading the copy
#else
constexpr int kCoarseRows = INT_MAX;
#endif
constexpr long kCoarsePart = 512;  // k of a block, whole runs, that stay in L1 while all rows use them

// The rows' integers, or their high bytes only: half the products, and limits that are looser by the low bytes.
class ScreenRows {
 public:
  ScreenRows(const Gemm& g, const Quant& copy) : coarse_(g.m >= kCoarseRows && g.k <= kMostRuns * IntegerRows::kRun), x_(rounded_rows.get(IntegerRows::bytes(g.m, copy)), g.m, copy) {
    x_.fill(g.k, [&](int r) { return g.x + r * g.ldx; });
    parallel_for(g.m, 4, [&](long r) { measure(g, r); });
  }

  // y[rows][32] = the rows times block nb of the copy.
  void multiply(const Screen& screen, const Quant& copy, int nb, float* y) const {
    if (!coarse_) return quant_block_of(copy)(copy, x_, nb, y);
#if defined(__AVX512F__)
    std::fill(y, y + x_.ld() * kCols, 0.f);
    const int passes = 2 * x_.groups();
    for (long k = 0; k < x_.width(); k += kCoarsePart) {
      const long end = std::min(k + kCoarsePart, x_.width());
      Fetch fetch{(const char*)screen.step(nb, k / 64) + kVectorAhead, (32 + passes - 1) / passes};
      for (int i = 0; i < x_.groups(); i++) of_rows(x_.size(i), [&](auto n) { high_bytes<n>(screen, i, nb, k, end, fetch, y + x_.begin(i) * kCols); });
    }
#endif
  }

  float norm[kMostGreedy], away[kMostGreedy];  // of each original row, and of what is left out of it

 private:
  void measure(const Gemm& g, long r) {
    float squares = 0, rest = 0;
    for (long run = 0; run < g.k; run += IntegerRows::kRun) {
      int sum = 0;
      for (long k = run, end = std::min<long>(run + IntegerRows::kRun, g.k); k < end; k++) {
        const int kept = coarse_ ? 256 * x_.high_byte(r, k) : x_.value(r, k);
        const float v = to_float(g.x[r * g.ldx + k]), off = v - float(kept) * x_.scale(r, k);
        squares += v * v, rest += off * off, sum += kept / 256;
      }
      if (coarse_) starts_[r][run / IntegerRows::kRun] = -128 * sum;
    }
    norm[r] = std::sqrt(squares), away[r] = std::sqrt(rest);
  }

#if defined(__AVX512F__)
  template <int ROWS>
  void high_bytes(const Screen& screen, int group, int nb, long k0, long k1, Fetch& fetch, float* y) const {
    for (int c = 0; c < 2; c++) {
      Floats totals[ROWS];
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { totals[r] = load_floats(y + r * kCols + c * 16); });
      for (long run = k0; run < k1; run += IntegerRows::kRun) {
        Ints sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = set1_ints(starts_[x_.begin(group) + r][run / IntegerRows::kRun]);
        for (long k = run, end = std::min(run + IntegerRows::kRun, k1); k < end; k += 64) {
          fetch.step();
          const int8_t* w = screen.step(nb, k / 64) + c * 1024;
          const int32_t* x = x_.values(group, k);
          for (int i = 0; i < 16; i++, w += 64, x += 2 * ROWS) {
            const Ints bytes = load_ints(w);
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { sums[r] = add_byte_products(sums[r], bytes, set1_ints(x[2 * r])); });
          }
        }
        const float* scales = x_.scales(group, run);
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { totals[r] = fma(to_floats(sums[r]), set1_floats(256 * scales[r]), totals[r]); });
      }
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { store_floats(y + r * kCols + c * 16, totals[r]); });
    }
  }
#endif

  static constexpr long kMostRuns = 64;
  const bool coarse_;
  const IntegerRows x_;
  int starts_[kMostGreedy][kMostRuns];  // cancel the offset of the copy's bytes, for the high bytes of a run
};

// Computes an upper bound of the logits of each block: limits [blocks][limits_ld(g.m)].
void find_limits(const Gemm& g, const Screen& screen, float* limits) {
  const bf16 one = to_bf16(1.f);
  bf16 ones[kCols];
  std::fill(ones, ones + kCols, one);
  // One group for all of k; group stride 0, so all blocks share these scales
  const Quant copy{(const uint8_t*)screen.data, ones, nullptr, kIntegers8, 1 << 30, 0, int(screen.k_steps)};
  const ScreenRows x(g, copy);
  over_blocks(g, Pool::get().threads(), kGreedyPiece, [&](auto&& each) {
    each([&](int nb) {
      alignas(64) float y[kMostGreedy * kCols];
      x.multiply(screen, copy, nb, y);
      const float* about = screen.about(nb);
      for (int r = 0; r < g.m; r++) {
        vf top = set1(kNegInf);
        for (int t = 0; t < kCols; t += 16) {
          const vf margin = fma(load(about + kCols + t), set1(x.away[r]), load(about + 2 * kCols + t) * set1(x.norm[r]));
          top = max(top, fma(load(y + r * kCols + t), load(about + t), margin));
        }
        limits[nb * limits_ld(g.m) + r] = reduce_max(top);
      }
    });
  });
}

// Computes exact logits of single blocks, by the same code as for all logits: of a few rows one after the other, else
// of all.
class Logits {
 public:
  explicit Logits(const Gemm& g) : g_(g), x_(memory(g), g.k, g.m) {
    x_.fill(g.k, [&](int r) { return g.x + r * g.ldx; });
    for (int r = 0; r < (g.m > kAlone ? g.m : 0); r++) alone(r).fill(g.k, [&](int) { return g.x + r * g.ldx; });
  }
  // Returns the rows that block computes to compute `rows`.
  uint32_t computed(uint32_t rows) const { return g_.m > kAlone && __builtin_popcount(rows) <= kAlone ? rows : uint32_t((1ull << g_.m) - 1); }
  // Calls f in a thread that computes blocks; no setup is needed.
  template <typename F>
  void run(F&& f) const { f(); }
  void block(const Gemm& to, int nb, uint32_t rows) const {
    alignas(64) float sums[kMostGreedy * kCols];
    if (rows == computed(~0u)) return vector_block(to, x_, 0, g_.m, nb, sums);
    for (; rows; rows &= rows - 1) {
      const int r = __builtin_ctz(rows);
      vector_block(to, alone(r), r, 1, nb, sums);
    }
  }

 private:
  static constexpr int kAlone = 4;  // maximum rows one after the other
  static float* memory(const Gemm& g) { return (float*)rounded_rows.get((Groups::floats(g.k, g.m) + g.m * Groups::floats(g.k, 1)) * sizeof(float)); }
  Groups alone(int r) const { return Groups((float*)x_.at(0, 0) + Groups::floats(g_.k, g_.m) + r * Groups::floats(g_.k, 1), g_.k, 1); }

  const Gemm& g_;
  const Groups x_;
};

}  // namespace

#endif
