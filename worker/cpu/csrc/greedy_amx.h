// Logit bounds from the 8-bit copy of the output head, and exact logits of single blocks, on AMX.
#pragma once

#include "gemm_few.h"
#include "greedy.h"

#if QUIRE_AMX

namespace {

// Rows as 16-bit integers in two planes of bytes: scale * (256 hi + lo).
struct RoundedRows {
  int rows;
  long ld;  // row stride of the planes
  int8_t *hi, *lo;
  float scale[kMostGreedy], norm[kMostGreedy];  // norm: of the original row
  float away = 0;  // largest ratio of the norm of a row's rounding errors to `norm`

  RoundedRows(Scratch& memory, const Gemm& g) : rows(g.m <= 16 ? g.m : kMostGreedy), ld(g.k + 64) {
    hi = (int8_t*)memory.get(2 * rows * ld), lo = hi + rows * ld;
    for (int r = 0; r < rows; r++) r < g.m ? fill(r, g.x + r * g.ldx, g.k) : clear(r, g.k);
  }

 private:
  void clear(int row, long k) { memset(hi + row * ld, 0, k), memset(lo + row * ld, 0, k); }
  void fill(int row, const bf16* x, long k) {
    vf top = zero(), squares = zero(), rest = zero();
    for (long i = 0; i < k; i += 16) top = max(top, max(load(x + i), zero() - load(x + i)));
    const float most = reduce_max(top), inverse = most > 1e-30f ? QuantRows::kTop / most : 0.f;
    scale[row] = most / QuantRows::kTop;
    for (long i = 0; i < k; i += 16) {
      const vf v = load(x + i);
      const __m512i n = _mm512_cvtps_epi32((v * set1(inverse)).v);
      const vf off = v - vf{_mm512_cvtepi32_ps(n)} * set1(scale[row]);
      squares = fma(v, v, squares), rest = fma(off, off, rest);
      _mm_storeu_si128((__m128i*)(lo + row * ld + i), _mm512_cvtepi32_epi8(n));
      _mm_storeu_si128((__m128i*)(hi + row * ld + i),
                       _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8)));
    }
    norm[row] = std::sqrt(reduce_add(squares));
    if (norm[row] > 0) away = std::max(away, std::sqrt(reduce_add(rest)) / norm[row]);
  }
};

// Computes upper bounds of the logits of each block. The sums of a block are evaluated row by row while AMX multiplies
// the next one.
class Limits {
 public:
  Limits(const Screen& screen, const RoundedRows& x, int rows, float* limits)
      : screen_(screen), x_(x), rows_(rows), limits_(limits) {}
  ~Limits() { flush(); }

  void block(int nb) {
    for (int row0 = 0; row0 < rows_; row0 += 16) {
      TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      for (long s = 0; s < screen_.k_steps; s++) {
        const int8_t* w = screen_.step(nb, s);
        if (row0 == 0) for (int i = 0; i < 2048; i += 64) read_ahead(w + i);
        TILE_LOAD(4, x_.hi + row0 * x_.ld + s * 64, x_.ld);
        TILE_LOAD(6, w, 64);
        TILE_DP_SS(0, 4, 6);
        TILE_LOAD(5, x_.lo + row0 * x_.ld + s * 64, x_.ld);
        TILE_DP_SS(1, 5, 6);
        TILE_LOAD(7, w + 1024, 64);
        TILE_DP_SS(2, 4, 7);
        TILE_DP_SS(3, 5, 7);
        if (s % kKeepAwakeFromMemory == 0) TILE_STORE(4, spare_, 64);
        row();
      }
      flush();
      TILE_STORE(0, sums_[0], 64);
      TILE_STORE(1, sums_[1], 64);
      TILE_STORE(2, sums_[2], 64);
      TILE_STORE(3, sums_[3], 64);
      nb_ = nb, row0_ = row0, next_ = 0, end_ = std::min(16, rows_ - row0);
      for (int t = 0; t < 2; t++) {
        const float* about = screen_.about(nb) + t * 16;
        store(margin_[t], fma(load(about + kCols), set1(x_.away), load(about + 2 * kCols)));
      }
    }
  }

 private:
  void row() {
    if (next_ == end_) return;
    const int r = row0_ + next_;
    vf top[2];
    for (int t = 0; t < 2; t++) {
      const vf hi = {_mm512_cvtepi32_ps(_mm512_load_si512(sums_[t * 2][next_]))},
               lo = {_mm512_cvtepi32_ps(_mm512_load_si512(sums_[t * 2 + 1][next_]))};
      const vf scale = load(screen_.about(nb_) + t * 16) * set1(x_.scale[r]);
      top[t] = fma(fma(hi, set1(256), lo), scale, load(margin_[t]) * set1(x_.norm[r]));
    }
    limits_[nb_ * limits_ld(rows_) + r] = reduce_max(max(top[0], top[1]));
    next_++;
  }
  void flush() {
    while (next_ < end_) row();
  }

  const Screen& screen_;
  const RoundedRows& x_;
  int rows_, nb_ = 0, row0_ = 0, next_ = 0, end_ = 0;
  float* limits_;
  alignas(64) int32_t sums_[4][16][16];  // hi and lo of the first 16 columns, then of the other 16
  alignas(64) float margin_[2][16];
  alignas(64) char spare_[1024];
};

// Computes an upper bound of the logits of each block: limits [blocks][limits_ld(g.m)].
void find_limits(const Gemm& g, const Screen& screen, float* limits) {
  const RoundedRows rounded(rounded_rows, g);
  over_blocks(g, Pool::get().threads(), kGreedyPiece, [&](auto&& each) {
    TileScope tiles(std::min(rounded.rows, 16));
    Limits work(screen, rounded, g.m, limits);
    each([&](int nb) { work.block(nb); });
  });
}

// Computes exact logits of single blocks, by the same code as for all logits.
class Logits {
 public:
  explicit Logits(const Gemm& g) : g_(g) {}
  // Calls f with this thread set up to compute blocks.
  template <typename F>
  void run(F&& f) const {
    TileScope tiles(std::min(g_.m, 16), 64, std::max(g_.m - 16, 0));
    f();
  }
  // Returns the rows that block computes to compute `rows`: a tile computes all.
  uint32_t computed(uint32_t) const { return uint32_t((1ull << g_.m) - 1); }
  void block(const Gemm& to, int nb, uint32_t) const {
    if (g_.compact) amx_few_rows_block<true>(to, g_.x, g_.ldx, nb);
    else amx_few_rows_block<false>(to, g_.x, g_.ldx, nb);
  }

 private:
  const Gemm& g_;
};

}  // namespace

#endif
