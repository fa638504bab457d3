// The largest logit of each row, where nothing else is wanted of them: the same as of all logits, but reading little more than 8 bits of each weight.
//
// Beside the output head lies a copy of it that is rounded to 8 bits. With a row h = h' + d, h' of 16 bits, and a weight w = w' + e, h w is at most h' w' + |d| |w'| + |h| |e|
// (Cauchy-Schwarz), where all norms are known beforehand. So one pass over the copy finds a limit for each block of 32 logits. The block with the highest limit of a row is
// computed as always, then those whose limits reach the largest logit found there: of random weights a few in a thousand. All others are smaller.
#include <climits>
#include <vector>

#include "gemm_few.h"

namespace {

// The copy: [columns / 32][k / 64][2 tiles of 16 columns][16][16 columns][4 k], right operands of AMX's byte products.
struct Screen {
  int8_t* data;
  float* columns;  // [columns / 32][scale, norm of what is rounded, norm of what rounding took away][32]
  long k_steps;    // of 64
  int8_t* step(long nb, long s) const { return data + (nb * k_steps + s) * 2048; }
  float* about(long nb) const { return columns + nb * 3 * kCols; }
};

#if QUIRE_AMX

constexpr int kMostRows = 32;

// --- making the copy --------------------------------------------------------------------------------------------------------------------------------

// A block of the weight as packed k-steps, in `room` if need be.
const bf16* packed_block(const Gemm& g, int nb, bf16* room) {
  if (!g.compact) return g.block(nb);
  const uint64_t* exceptions = g.compact->exceptions_from(nb, 0);
  for (int s = 0; s < g.k_steps(); s++) expand_step<false>(*g.compact, nb, s, exceptions, room + s * kStepElems);
  return room;
}

// Sixteen columns of a block: their tiles of the copy, and what is to be known of them. False if a weight is not finite.
bool round_columns(const Gemm& g, const Screen& screen, int nb, int tile, const bf16* packed) {
  const vf factor = set1(g.compact ? g.compact->scales[nb] : 1.f);
  auto weights = [&](int k) -> vf {  // of 16 columns
    const __m512i pairs = _mm512_load_si512(packed + k / kStep * kStepElems + tile * 512 + k % kStep / 2 * 32);
    return vf{_mm512_castsi512_ps(k % 2 ? _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))) : _mm512_slli_epi32(pairs, 16))} * factor;
  };
  vf top = zero(), rounded = zero(), away = zero(), all = zero();
  for (int k = 0; k < g.k; k++) top = max(top, max(weights(k), zero() - weights(k)));
  const vf scale = top * set1(1.f / 127), inverse = {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(scale.v, set1(1e-30f).v, _CMP_GT_OQ), set1(1).v, scale.v)};
  for (int k = 0; k < g.k; k += 4) {
    __m512i four = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
      const vf w = weights(k + i);
      const __m512i q = _mm512_cvtps_epi32((w * inverse).v);
      const vf kept = vf{_mm512_cvtepi32_ps(q)} * scale, rest = w - kept;
      rounded = fma(kept, kept, rounded), away = fma(rest, rest, away), all = fma(w, w, all);
      four = _mm512_or_si512(four, _mm512_slli_epi32(_mm512_and_si512(q, _mm512_set1_epi32(255)), i * 8));
    }
    _mm512_store_si512(screen.step(nb, k / 64) + tile * 1024 + k % 64 * 16, four);
  }
  auto norm = [](vf squares) { return vf{_mm512_sqrt_ps(squares.v)}; };
  // Sums of k products in float32, here and where they are computed as always, may be off by k * 2^-24 of the product of the norms each; twice that covers these norms, too.
  const vf slack = norm(all) * set1(float(g.k) * 0x1p-22f);
  float* about = screen.about(nb) + tile * 16;
  store(about, scale), store(about + kCols, norm(rounded)), store(about + 2 * kCols, norm(away) + slack);
  return std::isfinite(reduce_add(all));
}

// --- limits -----------------------------------------------------------------------------------------------------------------------------------------

// Rows as integers of 16 bits, in two planes of bytes: scale * (256 hi + lo).
struct RoundedRows {
  int rows;
  long ld;  // of the planes
  int8_t *hi, *lo;
  float scale[kMostRows], norm[kMostRows];  // norm: of the row as it was
  float away = 0;  // the largest ratio of the norm of what rounding took away to that

  RoundedRows(Scratch& memory, const Gemm& g) : rows(g.m <= 16 ? g.m : kMostRows), ld(g.k + 64) {
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
      _mm_storeu_si128((__m128i*)(hi + row * ld + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8)));
    }
    norm[row] = std::sqrt(reduce_add(squares));
    if (norm[row] > 0) away = std::max(away, std::sqrt(reduce_add(rest)) / norm[row]);
  }
};

// What the logits of blocks are at most. The sums of a block are looked at, row by row, while AMX multiplies the next one.
class Limits {
 public:
  Limits(const Screen& screen, const RoundedRows& x, int rows, float* limits) : screen_(screen), x_(x), rows_(rows), limits_(limits) {}
  ~Limits() { flush(); }

  static long ld(long rows) { return (rows + 15) / 16 * 16; }  // of the limits, [blocks][rows]

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
      TILE_STORE(0, sums_[0], 64); TILE_STORE(1, sums_[1], 64); TILE_STORE(2, sums_[2], 64); TILE_STORE(3, sums_[3], 64);
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
      const vf hi = {_mm512_cvtepi32_ps(_mm512_load_si512(sums_[t * 2][next_]))}, lo = {_mm512_cvtepi32_ps(_mm512_load_si512(sums_[t * 2 + 1][next_]))};
      const vf scale = load(screen_.about(nb_) + t * 16) * set1(x_.scale[r]);
      top[t] = fma(fma(hi, set1(256), lo), scale, load(margin_[t]) * set1(x_.norm[r]));
    }
    limits_[nb_ * ld(rows_) + r] = reduce_max(max(top[0], top[1]));
    next_++;
  }
  void flush() {
    while (next_ < end_) row();
  }

  const Screen& screen_;
  const RoundedRows& x_;
  int rows_, nb_ = 0, row0_ = 0, next_ = 0, end_ = 0;
  float* limits_;
  alignas(64) int32_t sums_[4][16][16];  // hi, lo of 16 columns, then of the others
  alignas(64) float margin_[2][16];
  alignas(64) char spare_[1024];
};

// --- logits -----------------------------------------------------------------------------------------------------------------------------------------

struct Best {  // of each row so far: the first of the largest
  float value[kMostRows];
  int index[kMostRows];
  bool nan = false;
  Best() { std::fill(value, value + kMostRows, kNegInf), std::fill(index, index + kMostRows, INT_MAX); }
  void take(int row, float v, int i) {
    if (v > value[row] || (v == value[row] && i < index[row])) value[row] = v, index[row] = i;
  }
};

class Greedy {
 public:
  Greedy(const Gemm& g, const float* limits) : g_(g), limits_(limits), ld_(Limits::ld(g.m)), done_(g.n_blocks()) {}

  // The blocks that may hold a row's largest logit, computed as always. How many.
  long find() {
    const std::vector<int> likely = highest();
    compute(likely);
    const std::vector<int> others = reached();
    compute(others);
    return long(likely.size() + others.size());
  }
  const Best& best() const { return best_; }

 private:
  // Each row's block with the highest limit.
  std::vector<int> highest() {
    std::vector<int> blocks;
    for (int r0 = 0; r0 < g_.m; r0 += 16) {
      vf top = load(limits_ + r0);
      __m512i at = _mm512_setzero_si512();
      for (int nb = 1; nb < g_.n_blocks(); nb++) {
        const vf limit = load(limits_ + nb * ld_ + r0);
        at = _mm512_mask_set1_epi32(at, _mm512_cmp_ps_mask(limit.v, top.v, _CMP_GT_OQ), nb);
        top = max(top, limit);
      }
      alignas(64) int32_t found[16];
      _mm512_store_si512(found, at);
      for (int r = 0; r < std::min(16, g_.m - r0); r++)
        if (!done_[found[r]]) blocks.push_back(found[r]), done_[found[r]] = true;
    }
    return blocks;
  }

  // Those whose limit for some row is not below the largest logit found for it.
  std::vector<int> reached() const {
    std::vector<int> blocks;
    for (int nb = 0; nb < g_.n_blocks(); nb++) {
      uint32_t rows = 0;
      for (int r0 = 0; r0 < g_.m; r0 += 16) rows |= uint32_t(_mm512_cmp_ps_mask(load(limits_ + nb * ld_ + r0).v, load(best_.value + r0).v, _CMP_NLT_UQ)) << r0;
      if (!done_[nb] && (rows & (~0u >> (32 - g_.m)))) blocks.push_back(nb);
    }
    return blocks;
  }

  void compute(const std::vector<int>& blocks) {
    std::vector<Best> found(Pool::get().threads());
    Stretches stretches(long(blocks.size()), Pool::get().threads());
    Pool::get().run([&] {
      TileScope tiles(std::min(g_.m, 16), 64, std::max(g_.m - 16, 0));
      for (long i, own = stretches.own(); stretches.take(own, i);) add(blocks[i], found[Pool::thread()]);
    });
    for (const Best& b : found) {
      best_.nan |= b.nan;
      for (int r = 0; r < g_.m; r++) best_.take(r, b.value[r], b.index[r]);
    }
  }

  void add(int nb, Best& best) const {
    alignas(64) float logits[kMostRows][kCols];
    Gemm here = g_;
    here.out = &logits[0][0] - nb * kCols, here.ldo = kCols;
    for (auto& row : logits) std::fill(row, row + kCols, kNegInf);  // the last block's may be fewer
    if (g_.compact) amx_few_rows_block<true>(here, g_.x, g_.ldx, nb);
    else amx_few_rows_block<false>(here, g_.x, g_.ldx, nb);
    for (int r = 0; r < g_.m; r++) {
      const vf a = load(logits[r]), b = load(logits[r] + 16);
      const float top = reduce_max(max(a, b));
      best.nan |= any_nan(a, b);
      if (top >= best.value[r]) best.take(r, top, nb * kCols + int(std::find(logits[r], logits[r] + kCols - 1, top) - logits[r]));
    }
  }

  const Gemm& g_;
  const float* limits_;
  const long ld_;
  std::vector<bool> done_;
  Best best_;
};

thread_local Scratch rounded_rows, block_limits;

#endif

}  // namespace

extern "C" {

// Makes the copy of a weight [n, k], packed or compact; k is a multiple of 64. False where it cannot have one: without AMX, or where a weight is not finite.
bool quire_screen_make(const bf16* packed, const Compact* compact, const Screen* screen, long n, long k) {
#if QUIRE_AMX
  const Gemm g{nullptr, 0, packed, nullptr, nullptr, 0, 0, int(n), int(k), 1, 0, nullptr, compact};
  std::atomic<bool> finite{true};
  parallel_for(g.n_blocks(), 16, [&](long nb) {
    const bf16* block = packed_block(g, int(nb), (bf16*)own_scratch.get(k * kCols * sizeof(bf16)));
    for (int tile = 0; tile < 2; tile++)
      if (!round_columns(g, *screen, int(nb), tile, block)) finite = false;
  });
  return finite;
#else
  return false;
#endif
}

// ids[r]: the first of the largest of the logits x[r] W^T, for x [m, k] with m <= 32 and a weight with its copy. Returns how many blocks of 32 logits were computed;
// -1 where a logit that counts is not finite: what that means is not for this to say.
long quire_greedy(const bf16* x, long ldx, const bf16* packed, const Compact* compact, const Screen* screen, int64_t* ids, long m, long n, long k) {
#if QUIRE_AMX
  const Gemm g{x, ldx, packed, nullptr, nullptr, 0, int(m), int(n), int(k), 1, 0, nullptr, compact};
  const RoundedRows rounded(rounded_rows, g);
  float* limits = (float*)block_limits.get(g.n_blocks() * Limits::ld(m) * sizeof(float));
  constexpr long kPiece = 4;  // blocks
  Stretches pieces((g.n_blocks() + kPiece - 1) / kPiece, Pool::get().threads());
  Pool::get().run([&] {
    TileScope tiles(std::min(rounded.rows, 16));
    Limits work(*screen, rounded, int(m), limits);
    for (long i, own = pieces.own(); pieces.take(own, i);)
      for (long nb = i * kPiece, end = std::min(nb + kPiece, long(g.n_blocks())); nb < end; nb++) work.block(int(nb));
  });
  Greedy greedy(g, limits);
  const long computed = greedy.find();
  bool finite = !greedy.best().nan;
  for (int r = 0; r < m; r++) ids[r] = greedy.best().index[r], finite &= std::isfinite(greedy.best().value[r]);
  return finite ? computed : -1;
#else
  return -1;
#endif
}
}
