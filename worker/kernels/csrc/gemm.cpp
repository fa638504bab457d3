// y[m, n] = x[m, k] W[n, k]^T (+ bias), bf16 in, fp32 accumulation, for a weight that is packed once.
//
// Packed weight: blocks of 32 output columns; a block is a sequence of k-steps of 32; a k-step is two tiles of 16 columns; a tile is 16 rows of
// 16 columns x 2 consecutive k, which is both AMX's right operand and what `vdpbf16ps` wants:
//     packed[n / 32][k / 32][n / 16 % 2][k / 2 % 16][n % 16][k % 2]          n and k padded with zeros to multiples of 32
// So whatever computes reads the weight once, front to back. The same layout serves one row and thousands.
//
// Where its exponents allow it the same weight is stored in three quarters of the bytes (compact.h), and its k-steps come out of that into a buffer in L1.
//
// Weights of 4 and 8 bits have a layout of their own (quant.h). Up to 32 rows are multiplied as integers; for more, a stretch of weight is expanded to
// bf16 in cache, in the layout above.
#include <algorithm>
#include <cassert>
#include <vector>

#include "amx.h"
#include "compact.h"
#include "kernels.h"
#include "parallel.h"
#include "quant.h"
#include "simd.h"

namespace {

constexpr int kCols = 32;                   // columns of a block
constexpr int kStep = 32;                   // k of a step
constexpr int kStepElems = kCols * kStep;   // 2 KiB of weight

struct Gemm {
  const bf16* x;
  long ldx;
  const bf16* packed;
  const float* bias;  // may be null
  void* out;
  long ldo;
  int m, n, k;
  int out_f32, silu_mul;
  const Quant* quant = nullptr;  // instead of `packed`, as is:
  const Compact* compact = nullptr;
  const Sink* sink = nullptr;  // instead of `out`; of many rows only

  int k_steps() const { return quant ? 2 * quant->k_steps : (k + kStep - 1) / kStep; }
  int n_blocks() const { return (n + kCols - 1) / kCols; }
  const bf16* block(int nb) const { return packed + size_t(nb) * k_steps() * kStepElems; }
  long block_bytes() const { return quant ? quant->k_steps * quant->step_bytes() : long(k_steps()) * 2 * (compact ? Compact::kStepWords : kStepElems); }
};

// Columns n0..n0+31 of one row: acc holds them as two vectors.
inline void finish_row(const Gemm& g, int row, int n0, vf a, vf b) {
  if (g.compact) a = a * set1(g.compact->scales[n0 / kCols]), b = b * set1(g.compact->scales[n0 / kCols]);
  if (g.silu_mul) {  // tile 0 is the gate, tile 1 the matching columns of up
    int n1 = n0 / 2, width = std::min(16, g.n / 2 - n1);
    bf16* p = (bf16*)g.out + row * g.ldo + n1;
    if (g.bias) a = a + load(g.bias + n0), b = b + load(g.bias + n0 + 16);
    vf r = silu(a) * b;
    if (width == 16) return store(p, r);
    bf16 t[16];
    store(t, r);
    memcpy(p, t, width * sizeof(bf16));
    return;
  }
  int width = g.n - n0;
  if (g.bias) a = a + load(g.bias + n0), b = b + load(g.bias + n0 + 16);  // the bias is padded to whole blocks
  if (g.out_f32) {
    float* p = (float*)g.out + row * g.ldo + n0;
    if (width >= kCols) { store(p, a); store(p + 16, b); return; }
    float t[kCols];
    store(t, a); store(t + 16, b);
    memcpy(p, t, width * sizeof(float));
  } else {
    bf16* p = (bf16*)g.out + row * g.ldo + n0;
    if (width >= kCols) { store(p, a); store(p + 16, b); return; }
    bf16 t[kCols];
    store(t, a); store(t + 16, b);
    memcpy(p, t, width * sizeof(bf16));
  }
}

inline void prefetch_step(const char* p) {
  for (int i = 0; i < 2 * kStepElems; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

// --- vector path: up to ROWS rows at a time, on any x86 with AVX2 ---------------------------------------------------------------------------------

// acc += the two products of each of 16 columns; w holds 16 pairs of bf16, x one pair.
#if defined(__AVX512BF16__)
inline vf dot_pairs(vf acc, const bf16* w, uint32_t x) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(int(x)))};
}
#elif defined(__AVX512F__)
inline vf dot_pairs(vf acc, const bf16* w, uint32_t x) {
  __m512i p = _mm512_loadu_si512(w);
  vf even = {_mm512_castsi512_ps(_mm512_slli_epi32(p, 16))}, odd = {_mm512_castsi512_ps(_mm512_and_si512(p, _mm512_set1_epi32(int(0xffff0000u))))};
  return fma(odd, set1(to_float(bf16{uint16_t(x >> 16)})), fma(even, set1(to_float(bf16{uint16_t(x)})), acc));
}
#else
inline vf dot_pairs(vf acc, const bf16* w, uint32_t x) {
  __m256 xe = _mm256_castsi256_ps(_mm256_set1_epi32(int(x << 16))), xo = _mm256_castsi256_ps(_mm256_set1_epi32(int(x & 0xffff0000u)));
  auto half = [&](__m256 c, const bf16* q) {
    __m256i p = _mm256_loadu_si256((const __m256i*)q);
    c = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(p, 16)), xe, c);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(p, _mm256_set1_epi32(int(0xffff0000u)))), xo, c);
  };
  return {half(acc.a, w), half(acc.b, w + 16)};
}
#endif

// Rows of x, as pairs, zero beyond k: the caller copies x when k is odd.
template <int ROWS>
void vector_block(const Gemm& g, const bf16* x, long ldx, int row0, int nb) {
  const bf16* w = g.block(nb);
  constexpr int CHAINS = ROWS >= 4 ? 1 : 4 / ROWS;  // several chains hide the latency of a few rows
  vf acc[CHAINS][ROWS][2];
  for (auto& c : acc) for (auto& r : c) r[0] = zero(), r[1] = zero();
  int pairs = (g.k + 1) / 2, steps = pairs / 16;
  auto pair_at = [&](int r, int p) {
    uint32_t v;
    memcpy(&v, x + r * ldx + 2 * p, 4);
    return v;
  };
  for (int s = 0; s < steps; s++, w += kStepElems) {
    prefetch_step((const char*)(w + 4 * kStepElems));
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++)
      for (int r = 0; r < ROWS; r++) {
        uint32_t v = pair_at(r, s * 16 + p);
        auto& c = acc[p % CHAINS][r];
        c[0] = dot_pairs(c[0], w + p * 32, v);
        c[1] = dot_pairs(c[1], w + kStepElems / 2 + p * 32, v);
      }
  }
  for (int p = 0; p < pairs % 16; p++)
    for (int r = 0; r < ROWS; r++) {
      uint32_t v = pair_at(r, steps * 16 + p);
      acc[0][r][0] = dot_pairs(acc[0][r][0], w + p * 32, v);
      acc[0][r][1] = dot_pairs(acc[0][r][1], w + kStepElems / 2 + p * 32, v);
    }
  for (int r = 0; r < ROWS; r++) {
    for (int c = 1; c < CHAINS; c++) acc[0][r][0] = acc[0][r][0] + acc[c][r][0], acc[0][r][1] = acc[0][r][1] + acc[c][r][1];
    finish_row(g, row0 + r, nb * kCols, acc[0][r][0], acc[0][r][1]);
  }
}

void vector_rows(const Gemm& g, const bf16* x, long ldx, int row0, int rows, int nb) {
#if defined(__AVX512F__)
  for (; rows >= 8; rows -= 8, row0 += 8, x += 8 * ldx) vector_block<8>(g, x, ldx, row0, nb);
  for (; rows >= 4; rows -= 4, row0 += 4, x += 4 * ldx) vector_block<4>(g, x, ldx, row0, nb);
#endif
  for (; rows >= 2; rows -= 2, row0 += 2, x += 2 * ldx) vector_block<2>(g, x, ldx, row0, nb);
  if (rows) vector_block<1>(g, x, ldx, row0, nb);
}

// --- AMX path ---------------------------------------------------------------------------------------------------------------------------------------

#if QUIRE_AMX

// Up to 32 rows of 32 columns; the left operand is a row-major matrix of whole k-steps. A compact weight is expanded two steps ahead of its use, so that the
// tiles are not loaded from lines that are still on their way to L1.
template <bool COMPACT>
void amx_few_rows_block(const Gemm& g, const bf16* x, long ldx, int nb) {
  constexpr int kAhead = 2;
  const bf16 *packed = COMPACT ? nullptr : g.block(nb), *lower = x + 16 * ldx;
  const int steps = g.k_steps();
  alignas(64) bf16 ring[COMPACT ? 2 * kAhead : 1][kStepElems];
  alignas(64) float c[4][16][16], spare[16][16];
  auto fetch = [&](int s) {
    if constexpr (COMPACT) {
      if (s >= steps) return;
      const char* ahead = (const char*)g.compact->step(nb, s) + 8192;
      for (int i = 0; i < 2 * Compact::kStepWords; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
      expand_step(*g.compact, nb, s, ring[s % (2 * kAhead)]);
    } else {
      prefetch_step((const char*)(packed + (s - kAhead + 4) * kStepElems));
    }
  };
  auto tiles = [&](int s) -> const bf16* { return COMPACT ? ring[s % (2 * kAhead)] : packed + s * kStepElems; };
  TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
  if (COMPACT) for (int s = 0; s < kAhead; s++) fetch(s);
  for (int s = 0; s < steps; s++) {
    fetch(s + kAhead);
    const bf16* w = tiles(s);
    TILE_LOAD(4, x + s * kStep, ldx * 2);
    TILE_LOAD(6, w, 64);
    TILE_DP(0, 4, 6);
    TILE_LOAD(7, w + kStepElems / 2, 64);
    TILE_DP(1, 4, 7);
    if (s % kKeepAwakeFromMemory == 0) TILE_STORE(4, spare, 64);
    if (g.m <= 16) continue;
    TILE_LOAD(5, lower + s * kStep, ldx * 2);
    TILE_DP(2, 5, 6);
    TILE_DP(3, 5, 7);
  }
  if (g.m > 16) { TILE_STORE(2, c[2], 64); TILE_STORE(3, c[3], 64); }
  TILE_STORE(0, c[0], 64); TILE_STORE(1, c[1], 64);
  for (int r = 0; r < g.m; r++) finish_row(g, r, nb * kCols, load(c[r / 16 * 2][r % 16]), load(c[r / 16 * 2 + 1][r % 16]));
}

#endif

thread_local Scratch shared_scratch, own_scratch;

int pieces_of(const Gemm& g, int threads, long bytes_per_block) {  // blocks per piece: up to 128 KiB, but at least four pieces a thread
  long blocks = g.n_blocks();
  long by_size = std::max(1L, (128L << 10) / bytes_per_block);
  return int(std::max(1L, std::min(by_size, blocks / (4L * threads))));
}

// Calls work(each) in every thread; each(f) calls f with the numbers of the blocks that fall to the thread.
template <typename W>
void over_blocks(const Gemm& g, int threads, W&& work) {
  const long per = pieces_of(g, threads, g.block_bytes());
  Stretches pieces((g.n_blocks() + per - 1) / per, threads);
  Pool::get().run([&] {
    const int own = pieces.join();
    work([&](auto&& block) {
      for (long i; pieces.take(own, i);)
        for (int nb = int(i * per), end = std::min(int(nb + per), g.n_blocks()); nb < end; nb++) block(nb);
    });
  });
}

void run_few_rows(const Gemm& g, int threads, bool amx) {
  const bf16* x = g.x;
  long ldx = g.ldx;
  if (amx ? g.k % kStep : g.k % 2) {  // operands are read in whole k-steps (or pairs): copy to pad
    ldx = long(g.k_steps()) * kStep;
    bf16* copy = (bf16*)shared_scratch.get(g.m * ldx * 2);
    for (int r = 0; r < g.m; r++) {
      memcpy(copy + r * ldx, g.x + r * g.ldx, g.k * 2);
      memset(copy + r * ldx + g.k, 0, (ldx - g.k) * 2);
    }
    x = copy;
  }
  over_blocks(g, threads, [&](auto&& each) {
#if QUIRE_AMX
    if (amx) {
      TileScope tiles(std::min(g.m, 16), 64, g.m - 16 > 0 ? g.m - 16 : 0);
      if (g.compact) each([&](int nb) { amx_few_rows_block<true>(g, x, ldx, nb); });
      else each([&](int nb) { amx_few_rows_block<false>(g, x, ldx, nb); });
    } else
#endif
      each([&](int nb) { vector_rows(g, x, ldx, 0, g.m, nb); });
  });
}

template <int ROWS>
void vector_quant_rows(const Gemm& g, const QuantRows& x, int row0, int nb) {
  vf y[ROWS][2];
  if (g.quant->bits == 8) vector_quant_block<ROWS, 8>(*g.quant, x, row0, nb, y);
  else vector_quant_block<ROWS, 4>(*g.quant, x, row0, nb, y);
  for (int r = 0; r < ROWS; r++) finish_row(g, row0 + r, nb * kCols, y[r][0], y[r][1]);
}

constexpr int kMaxQuantRows = 32;  // of AMX's integer products; from there on expanding the weight costs less than scaling the sums

void run_quant_rows(const Gemm& g, int threads, bool amx) {
  const Quant& q = *g.quant;
  const int rows = amx ? (g.m + 15) / 16 * 16 : g.m;
  QuantRows x((char*)shared_scratch.get(QuantRows::bytes(rows, q)), rows, q);
  parallel_for(rows, g.m <= 4 ? rows : 4, [&](long r) { x.fill(r, r < g.m ? g.x + r * g.ldx : nullptr, g.k, amx); });
  over_blocks(g, threads, [&](auto&& each) {
#if QUIRE_AMX
    if (amx) {
      TileScope tiles(std::min(g.m, 16), std::min(q.group, 64));
      each([&](int nb) {
        alignas(64) float y[kMaxQuantRows][32];
        for (int r0 = 0; r0 < g.m; r0 += kMaxQuantRows) {
          const int n = std::min(kMaxQuantRows, g.m - r0);
          amx_quant_block(q, x, r0, n, nb, y);
          for (int r = 0; r < n; r++) finish_row(g, r0 + r, nb * kCols, load(y[r]), load(y[r] + 16));
        }
      });
    } else
#endif
      each([&](int nb) {
        int r = 0;
        for (; r + 4 <= g.m; r += 4) vector_quant_rows<4>(g, x, r, nb);
        if (g.m - r == 3) vector_quant_rows<3>(g, x, r, nb);
        else if (g.m - r == 2) vector_quant_rows<2>(g, x, r, nb);
        else if (g.m - r == 1) vector_quant_rows<1>(g, x, r, nb);
      });
  });
}

#if QUIRE_AMX

// Many rows. They go in groups of at most kMaxRows; k whole if it is at most kWhole steps, else in runs of at most kRun. Such a piece of the rows, up to 1 MiB, stays in
// L2, a block of the weight streams by, and of that the first kHot steps (fewer where what is expanded meanwhile goes through L1, too) stay in L1 while all rows of
// the group use them. Sums that are not complete at the end of a run wait in memory, beside the rows in L2: those of kBlocksAtOnce blocks.
constexpr int kMaxRows = 512, kWhole = 32, kRun = 20, kBlocksAtOnce = 16, kHot = 18, kHotBesideExpanding = 12;
// With few pairs of tiles a weight that is expanded goes in runs whose two buffers stay in L1, and so do the sums of its one block.
constexpr int kFewPairs = 4, kRunInL1 = 8;

// The left operand: rows of x as they lie, but for what must be padded to whole k-steps or whole pairs of tiles, which is copied.
class PairedRows {
 public:
  explicit PairedRows(const Gemm& g) : g_(g), ld_(g.ldx), rows_(g.x), whole_(g.m / 32) {
    const long width = long(g.k_steps()) * kStep;
    if (g.k != width || g.ldx * 2 % 4096 == 0) whole_ = 0;
    if (whole_ * 32 == g.m) return;
    tail_ld_ = width + kStep;  // not a multiple of 4 KiB, which would put a tile's rows into the same few lines of a cache
    const long first = whole_ * 32, rows = (g.m + 31) / 32 * 32 - first;
    tail_ = (bf16*)shared_scratch.get(rows * tail_ld_ * 2);
    parallel_for(rows, 4, [&](long r) {
      bf16* to = tail_ + r * tail_ld_;
      const long given = first + r < g.m ? g.k : 0;
      if (given) memcpy(to, g.x + (first + r) * g.ldx, given * 2);
      memset(to + given, 0, (width - given) * 2);
    });
  }
  const bf16* pair(int p) const { return p < whole_ ? rows_ + p * 32 * ld_ : tail_ + (p - whole_) * 32 * tail_ld_; }
  long ld(int p) const { return p < whole_ ? ld_ : tail_ld_; }

 private:
  const Gemm& g_;
  long ld_, tail_ld_ = 0;
  const bf16* rows_;
  bf16* tail_ = nullptr;
  long whole_;  // pairs of tiles that are used where they are
};

// What of the weight is used at a time: k-steps [s0, s1) of block nb. s0 and s1 are even.
struct Part {
  int nb = -1, s0 = 0, s1 = 0;
  int steps() const { return s1 - s0; }
  bool operator==(const Part& o) const { return nb == o.nb && s0 == o.s0 && s1 == o.s1; }
};

// Hands out a part as tiles, and gets the next one ready in the meantime: in L2, or, if the weight is not stored as tiles, expanded into one of two buffers.
class WeightStream {
 public:
  WeightStream(const Gemm& g, bf16* buffer, int max_steps) : g_(g), expanded_(g.quant || g.compact), ready_(buffer), filling_(buffer + max_steps * kStepElems) {}
  static long buffer_bytes(const Gemm& g, int max_steps) { return g.quant || g.compact ? 4L * max_steps * kStepElems : 0; }

  const bf16* tiles(const Part& at) {
    if (!expanded_) return place(at);
    if (!(next_ == at)) start(at);
    while (unit_ < units_) expand();
    next_ = Part();
    std::swap(ready_, filling_);
    return ready_;
  }

  bool expanded() const { return expanded_; }

  // `next` will be wanted after `calls` calls of bring(), each of which brings a share of it.
  void announce(const Part& next, long calls) {
    if (expanded_) return start(next), void(calls_ = calls);
    at_ = (const char*)place(next);
    share_ = (next.steps() * 2L * kStepElems / calls + 63) / 64 * 64;
  }
  void bring() {
    if (expanded_) {
      for (due_ += units_; due_ >= calls_; due_ -= calls_)
        if (unit_ < units_) expand();
      return;
    }
    for (long i = 0; i < share_; i += 64) _mm_prefetch(at_ + i, _MM_HINT_T1);
    at_ += share_;
  }

 private:
  static constexpr long kFirst = 4096, kAhead = 3072;  // bytes that are fetched when a part begins, and from then on ahead

  const bf16* place(const Part& at) const { return g_.block(at.nb) + size_t(at.s0) * kStepElems; }

  void start(const Part& next) {
    next_ = next;
    unit_ = 0, due_ = 0;
    units_ = g_.compact ? next.steps() * 8 : next.steps();  // a group of a k-step; half of two k-steps
    source_ = g_.compact ? (const char*)g_.compact->step(next.nb, next.s0) : (const char*)g_.quant->step(next.nb, next.s0 / 2);
    for (long i = 0; i < kFirst; i += 64) _mm_prefetch(source_ + i, _MM_HINT_T0);
  }
  void expand() {
    const long bytes = g_.compact ? 192 : g_.quant->step_bytes() / 2;
    for (long i = 0; i < bytes; i += 64) _mm_prefetch(source_ + kAhead + i, _MM_HINT_T0);
    if (g_.compact) {
      expand_group((const uint16_t*)source_, filling_ + unit_ * 128);
      if (unit_ % 8 == 7) put_exceptions(*g_.compact, long(next_.nb) * g_.compact->k_steps + next_.s0 + unit_ / 8, filling_ + unit_ / 8 * kStepElems);
    } else {
      dequantize_half(*g_.quant, next_.nb, next_.s0 / 2 + unit_ / 2, unit_ % 2, filling_ + unit_ / 2 * 2 * kStepElems);
    }
    source_ += bytes;
    unit_++;
  }

  const Gemm& g_;
  const bool expanded_;
  bf16 *ready_, *filling_;
  Part next_;  // that `filling_` is for
  int unit_ = 0, units_ = 0;
  long due_ = 0, calls_ = 1;
  const char *at_ = nullptr, *source_ = nullptr;
  long share_ = 0;
};

// Sums of 32 rows and 32 columns on their way out: they are finished row by row while AMX computes the next ones.
class Finisher {
 public:
  explicit Finisher(const Gemm& g) : g_(g) {}
  void take(int pair, int nb) {  // tiles 0 .. 3
    flush();
    TILE_STORE(0, sums_[0], 64); TILE_STORE(1, sums_[1], 64); TILE_STORE(2, sums_[2], 64); TILE_STORE(3, sums_[3], 64);
    row0_ = pair * 32, nb_ = nb, next_ = 0, end_ = std::min(32, g_.m - row0_);
  }
  void row() {
    if (next_ == end_) return;
    if (next_ + kAhead < end_) __builtin_prefetch(place(next_ + kAhead), 1);
    const int tile = next_ / 16 * 2, r = next_ % 16;
    finish_row(g_, row0_ + next_, nb_ * kCols, load(sums_[tile][r]), load(sums_[tile + 1][r]));
    next_++;
  }
  void flush() {
    while (next_ < end_) row();
  }

 private:
  static constexpr int kAhead = 3;  // rows; a store that waits for its line holds up all that come after it
  const char* place(int r) const {
    const long column = g_.silu_mul ? nb_ * 16 : nb_ * kCols;
    return (const char*)g_.out + ((row0_ + r) * g_.ldo + column) * (g_.out_f32 ? 4 : 2);
  }
  const Gemm& g_;
  alignas(64) float sums_[4][16][16];
  int row0_ = 0, nb_ = 0, next_ = 0, end_ = 0;
};

// Sums that wait for the next run, 32 rows and 32 columns each: [pair][4][16][16] block after block. The next ones are fetched into L1 while these are added to: tile
// loads, and still more tile stores, that miss it hold up the products.
class WaitingSums {
 public:
  WaitingSums(float* memory, int pairs) : memory_(memory), pairs_(pairs) {}
  float* of(int pair, int block) { return memory_ + (size_t(block) * pairs_ + pair) * kElems; }
  void announce(const float* next) { next_ = (const char*)next, end_ = next_ + kElems * sizeof(float); }
  void bring() {
    for (int i = 0; i < 3 && next_ < end_; i++, next_ += 64) __builtin_prefetch(next_, 1);
  }

 private:
  static constexpr int kElems = 1024;
  float* memory_;
  int pairs_;
  const char *next_ = nullptr, *end_ = nullptr;
};

// Blocks [nb0, nb1) of the weight for the pairs of tiles [pair0, pair1) of rows.
struct ManyRows {
  Gemm g;  // a copy: with a sink, `out` is this thread's
  const PairedRows& x;
  bf16* room;  // for what the sink takes at a time
  WeightStream weights;
  Finisher finisher;
  WaitingSums waiting;  // where there are several runs
  alignas(64) char spare[1024];

  void run(int pair0, int pair1, int nb0, int nb1, int max_run) {
    const int steps = g.k_steps();
    for (int s0 = 0; s0 < steps; s0 += max_run) {
      const int s1 = std::min(s0 + max_run, steps);
      for (int nb = nb0; nb < nb1; nb++) {
        const Part at{nb, s0, s1};
        if (g.sink && nb % sink_blocks() == 0) g.out = room - pair0 * 32 * g.ldo - nb * kCols;
        const bf16* w = weights.tiles(at);
        weights.announce(after(at, nb0, nb1, max_run), long(pair1 - pair0) * at.steps());
        for (int p = pair0; p < pair1; p++) {
          if (max_run < steps) waiting.announce(p + 1 < pair1 ? waiting.of(p + 1 - pair0, nb - nb0) : waiting.of(0, nb + 1 < nb1 ? nb + 1 - nb0 : 0));
          multiply(p, at, w, waiting.of(p - pair0, nb - nb0));
        }
        if (g.sink && s1 == steps && (nb + 1) % sink_blocks() == 0) {
          finisher.flush();
          g.sink->take(g.sink->context, room, g.ldo, pair0 * 32, std::min(pair1 * 32, g.m) - pair0 * 32, (nb + 1) * kCols - g.sink->columns);
        }
      }
    }
  }

 private:
  int sink_blocks() const { return int(g.sink->columns / kCols); }

  Part after(const Part& at, int nb0, int nb1, int max_run) const {  // beyond the last it guesses that the thread goes on with the piece that follows
    if (at.nb + 1 < nb1) return {at.nb + 1, at.s0, at.s1};
    if (at.s1 < g.k_steps()) return {nb0, at.s1, std::min(at.s1 + max_run, g.k_steps())};
    return {nb1 < g.n_blocks() ? nb1 : 0, 0, std::min(max_run, g.k_steps())};
  }

  void multiply(int p, const Part& at, const bf16* w, float* sums) {
    if (at.s0 == 0) { TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3); }
    else { TILE_LOAD(0, sums, 64); TILE_LOAD(1, sums + 256, 64); TILE_LOAD(2, sums + 512, 64); TILE_LOAD(3, sums + 768, 64); }
    amx_tiles_2x2_streaming(x.pair(p) + at.s0 * kStep, x.ld(p), w, at.steps(), weights.expanded() ? kHotBesideExpanding : kHot, spare, [&] { weights.bring(); waiting.bring(); finisher.row(); });
    if (at.s1 == g.k_steps()) return finisher.take(p, at.nb);
    TILE_STORE(0, sums, 64); TILE_STORE(1, sums + 256, 64); TILE_STORE(2, sums + 512, 64); TILE_STORE(3, sums + 768, 64);
  }
};

// Each piece reads its rows anew, with several runs once per run: then pieces are few and large.
long blocks_per_piece(long blocks, long groups, long threads, bool in_l1, bool several_runs) {
  if (in_l1) return 1;
  if (!several_runs) return std::max(1L, std::min(4L, blocks * groups / (4 * threads)));
  const long least = (blocks + kBlocksAtOnce - 1) / kBlocksAtOnce * groups, pieces = (least + threads - 1) / threads * threads;  // as many for each thread
  return std::max(1L, (blocks * groups + pieces - 1) / pieces);
}

void run_many_rows(const Gemm& g, int threads) {
  const int steps = g.k_steps(), blocks = g.n_blocks(), pairs = (g.m + 31) / 32;
  const bool in_l1 = (g.quant || g.compact) && pairs <= kFewPairs;
  const int longest = in_l1 ? kRunInL1 : steps <= kWhole ? kWhole : kRun, runs = (steps + longest - 1) / longest, max_run = ((steps + runs - 1) / runs + 1) / 2 * 2;
  const int groups = (pairs * 32 + kMaxRows - 1) / kMaxRows, group = (pairs + groups - 1) / groups;
  const long at_once = g.sink ? g.sink->columns / kCols : 1;  // blocks that must not part
  const long per = (blocks_per_piece(blocks, groups, threads, in_l1, runs > 1) + at_once - 1) / at_once * at_once, pieces = (blocks + per - 1) / per;
  const PairedRows x(g);
  Stretches stretches(pieces * groups, threads);
  Pool::get().run([&] {
    TileScope tiles;
    const int own = stretches.join();
    const long buffer = WeightStream::buffer_bytes(g, max_run), sums = runs > 1 ? group * per * 4096 : 0;
    char* memory = (char*)own_scratch.get(buffer + sums + (g.sink ? group * 32 * g.ldo * 2 : 0));
    ManyRows work{g, x, (bf16*)(memory + buffer + sums), WeightStream(g, (bf16*)memory, max_run), Finisher(work.g), WaitingSums((float*)(memory + buffer), group)};
    for (long i; stretches.take(own, i);) {
      const int pair0 = int(i / pieces) * group, nb0 = int(i % pieces * per);
      work.run(pair0, std::min(pair0 + group, pairs), nb0, std::min(int(nb0 + per), blocks), max_run);
    }
    work.finisher.flush();
  });
}
#endif

// path: as in quire_gemm_run and quire_gemm_run_quant.
bool by_many_rows(const Gemm& g, int path) {
#if QUIRE_AMX
  if (!amx_permitted()) return false;
  if (!g.quant) return path != 1 && g.m > 32;
  return path == 3 || (path == 0 && g.m > (g.quant->group < 64 ? kMaxQuantRows / 2 : kMaxQuantRows));
#else
  return false;
#endif
}

void run_bf16(const Gemm& g, int path) {
  const int threads = Pool::get().threads();
#if QUIRE_AMX
  if (by_many_rows(g, path)) return run_many_rows(g, threads);
  if (path != 1 && amx_permitted()) return run_few_rows(g, threads, true);
#endif
  assert(!g.compact);
  run_few_rows(g, threads, false);
}

}  // namespace

extern "C" {

// How many threads all kernels use from now on, the caller's included.
void quire_set_threads(int n) { Pool::get().set_threads(n); }

// Source column of packed column j: with silu_mul, tiles of 16 gate columns and the matching 16 up columns alternate.
static inline long source_column(long j, long n, int silu_mul) {
  if (!silu_mul) return j < n ? j : -1;
  long half = n / 2, i = j / 32 * 16 + j % 16;
  return i < half ? (j % 32 < 16 ? i : half + i) : -1;
}

// Columns the packed weight has: n rounded up to whole blocks (of each half, with silu_mul).
long quire_gemm_packed_columns(long n, int silu_mul) { return silu_mul ? (n / 2 + 15) / 16 * 32 : (n + 31) / 32 * 32; }

// Block nb of weight [n, k] with row stride ldw, to [ceil(k / 32)][2][16][16][2]. What there is no weight for is 0, or, with `repeat`, some other weight: it meets
// only zeros, or gives outputs that nobody reads.
static void pack_block(const bf16* weight, long ldw, bf16* packed, long nb, long n, long k, int silu_mul, bool repeat) {
  const long steps = (k + kStep - 1) / kStep;
  for (long t = 0; t < 2; t++) {
    const bf16* rows[16];
    for (int c = 0; c < 16; c++) {
      long j = source_column(nb * 32 + t * 16 + c, n, silu_mul);
      rows[c] = j >= 0 ? weight + j * ldw : repeat ? weight : nullptr;
    }
    for (long s = 0; s < steps; s++) {
      uint32_t* dst = (uint32_t*)(packed + s * kStepElems + t * (kStepElems / 2));
#if defined(__AVX512F__)
      if ((s + 1) * kStep <= k) {
        __m512i r[16];
        for (int c = 0; c < 16; c++) r[c] = rows[c] ? _mm512_loadu_si512(rows[c] + s * kStep) : _mm512_setzero_si512();
        transpose_16x16(r);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(dst + i * 16, r[i]);
        continue;
      }
#endif
      auto at = [&](int c, long kk) -> uint32_t { return rows[c] && (kk < k || repeat) ? rows[c][kk < k ? kk : 0].bits : 0; };
      for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) dst[r * 16 + c] = at(c, s * kStep + 2 * r) | at(c, s * kStep + 2 * r + 1) << 16;
    }
  }
}

// weight [n, k] with row stride ldw, to packed [columns / 32][ceil(k / 32)][2][16][16][2].
void quire_gemm_pack(const bf16* weight, long ldw, bf16* packed, long n, long k, int silu_mul) {
  const long steps = (k + kStep - 1) / kStep, blocks = quire_gemm_packed_columns(n, silu_mul) / kCols;
  parallel_for(blocks, 4, [&](long nb) { pack_block(weight, ldw, packed + nb * steps * kStepElems, nb, n, k, silu_mul, false); });
}

// The same to 12 bits: data [columns / 32][ceil(k / 32)][768], exceptions [columns / 32][ceil(k / 32) * 1024], first [columns / 32 * ceil(k / 32) + 1],
// scales [columns / 32]. Returns the number of exceptions, which then lie at the start of theirs; -1: there are more than `most`, or a weight is not of that kind.
long quire_gemm_compact(const bf16* weight, long ldw, uint16_t* data, uint32_t* exceptions, uint32_t* first, float* scales, long n, long k, int silu_mul, long most) {
#if QUIRE_AMX
  const long steps = (k + kStep - 1) / kStep, blocks = quire_gemm_packed_columns(n, silu_mul) / kCols, room = steps * kStepElems;
  std::vector<long> counts(blocks);
  std::atomic<long> left{most};
  parallel_for(blocks, 4, [&](long nb) {
    if (left < 0) return;
    bf16* packed = (bf16*)own_scratch.get(room * 2);
    pack_block(weight, ldw, packed, nb, n, k, silu_mul, true);
    counts[nb] = compact_block(packed, int(steps), data + nb * steps * Compact::kStepWords, exceptions + nb * room, first + nb * steps, scales + nb);
    left -= counts[nb] < 0 ? most + 1 : counts[nb];
  });
  if (left < 0) return -1;
  long total = 0;
  for (long nb = 0; nb < blocks; total += counts[nb++]) {
    memmove(exceptions + total, exceptions + nb * room, counts[nb] * sizeof(uint32_t));
    for (long s = 0; s < steps; s++) first[nb * steps + s] += uint32_t(total);
  }
  first[blocks * steps] = uint32_t(total);
  return total;
#else
  return -1;  // only that code reads it
#endif
}

// out[i, :k] = row ids[i] of the weight that `packed` was made from (without silu_mul): an embedding that shares the packed LM head.
void quire_gemm_unpack_rows(const bf16* packed, const long* ids, long num_ids, bf16* out, long ldo, long k) {
  const long steps = (k + kStep - 1) / kStep;
  parallel_for(num_ids, 4, [&](long i) {
    const bf16* col = packed + ids[i] / 32 * steps * kStepElems + ids[i] / 16 % 2 * (kStepElems / 2) + ids[i] % 16 * 2;
    for (long kk = 0; kk < k; kk++) out[i * ldo + kk] = col[kk / kStep * kStepElems + kk % kStep / 2 * 32 + kk % 2];
  });
}

// The same of a compact weight.
void quire_compact_rows(const Compact* w, const long* ids, long num_ids, bf16* out, long ldo, long k) {
#if QUIRE_AMX
  parallel_for(num_ids, 4, [&](long i) {
    const int nb = int(ids[i] / 32), v0 = int(ids[i] / 16 % 2) * 16, pair = int(ids[i] % 16);
    bf16* row = out + i * ldo;
    for (int s = 0; s < w->k_steps; s++) {
      const long step = long(nb) * w->k_steps + s;
      uint32_t values[16];
      for (int r = 0; r < 16; r++) values[r] = expand_pair(w->step(nb, s), v0 + r, pair);
      for (uint32_t e = w->first[step]; e < w->first[step + 1]; e++) {
        const int place = int(w->exceptions[e] >> 16) - v0 * 32;
        if (place >= 0 && place < 512 && place / 2 % 16 == pair) memcpy((uint16_t*)(values + place / 32) + place % 2, w->exceptions + e, 2);
      }
      const vf scale = set1(w->scales[nb]);  // exact: a power of two
      bf16 step_values[32];
      for (int half = 0; half < 2; half++) store(step_values + half * 16, load((const bf16*)values + half * 16) * scale);
      memcpy(row + s * kStep, step_values, std::min(long(kStep), k - s * kStep) * 2);
    }
  });
#endif
}

// bias: fp32, padded to the packed columns, in packed order. out: bf16, or float32 with out_f32. path: 0 automatic, 1 vector, 2 AMX.
void quire_gemm_run(const bf16* x, long ldx, const bf16* packed, const float* bias, void* out, long ldo, long m, long n, long k, int flags, int path) {
  run_bf16({x, ldx, packed, bias, out, ldo, int(m), int(n), int(k), flags & 1, flags >> 1 & 1}, path);
}

// As quire_gemm_run, for a compact weight.
void quire_gemm_run_compact(const bf16* x, long ldx, const Compact* weight, const float* bias, void* out, long ldo, long m, long n, long k, int flags, int path) {
  run_bf16({x, ldx, nullptr, bias, out, ldo, int(m), int(n), int(k), flags & 1, flags >> 1 & 1, nullptr, weight}, path);
}

// As quire_gemm_run, for a weight of 4 or 8 bits. path: 0 automatic, 1 integers without AMX, 2 with, 3 expanded to bf16.
void quire_gemm_run_quant(const bf16* x, long ldx, const Quant* weight, const float* bias, void* out, long ldo, long m, long n, long k, int flags, int path) {
  Gemm g{x, ldx, nullptr, bias, out, ldo, int(m), int(n), int(k), flags & 1, flags >> 1 & 1, weight};
  const int threads = Pool::get().threads();
#if QUIRE_AMX
  if (by_many_rows(g, path)) return run_many_rows(g, threads);
  if (amx_permitted() && (path == 2 || (path == 0 && m > 4))) return run_quant_rows(g, threads, true);
#endif
  run_quant_rows(g, threads, false);
}

// As those, whichever weight is not null, but the result goes to `sink`. False, and nothing is done, where the rows are few, there is no AMX, or the sink takes so much at
// a time that threads would be idle.
bool quire_gemm_run_to_sink(const bf16* x, long ldx, const bf16* packed, const Quant* quant, const Compact* compact, const float* bias, const Sink* sink, long m, long n, long k, int path) {
  Gemm g{x, ldx, packed, bias, nullptr, sink->columns + kCols, int(m), int(n), int(k), 0, 0, quant, compact, sink};
  const int threads = Pool::get().threads();
  if (!by_many_rows(g, path) || n / sink->columns < 2 * threads) return false;
#if QUIRE_AMX
  run_many_rows(g, threads);
#endif
  return true;
}

// Quantizes weight [n, k] (bf16) into `data` and `scales`; no offsets. group: a multiple of 32.
void quire_quantize(const bf16* weight, long ldw, uint8_t* data, bf16* scales, long n, long k, int bits, long group, int silu_mul) {
  const long steps = (k + 63) / 64, groups = (steps * 64 + group - 1) / group, columns = quire_gemm_packed_columns(n, silu_mul);
  parallel_for(columns / 16, 2, [&](long tile) {
    const long ld = steps * 64;
    float* w = (float*)own_scratch.get(ld * 20);
    int8_t* q = (int8_t*)(w + ld);
    for (int c = 0; c < 16; c++) {
      const long source = source_column(tile * 16 + c, n, silu_mul), given = source < 0 ? 0 : k;
      long i = 0;
      for (; i + 16 <= given; i += 16) store(w + i, load(weight + source * ldw + i));
      for (; i < ld; i++) w[i] = i < given ? to_float(weight[source * ldw + i]) : 0.f;
      for (long at = 0, begin = 0; begin < ld; at++, begin += group)
        scales[(tile / 2 * groups + at) * kCols + tile % 2 * 16 + c] = to_bf16(quantize_group(w + begin, int(std::min(group, ld - begin)), bits, q + c * ld + begin));
    }
    pack_columns(data, bits, int(steps), tile / 2, int(tile % 2), q);
  });
}

// The same for a weight that is quantized already: values [n, k] signed (-8 .. 7 for 4 bits), scale and offset [n, ceil(k / group)]
// float32, offset may be null.
void quire_pack_quantized(const int8_t* values, const float* scale, const float* offset, uint8_t* data, bf16* scales, bf16* offsets, long n, long k, int bits,
                          long group, int silu_mul) {
  const long steps = (k + 63) / 64, groups = (steps * 64 + group - 1) / group, columns = quire_gemm_packed_columns(n, silu_mul);
  const long given = (k + group - 1) / group;  // groups that the source has
  parallel_for(columns / 16, 2, [&](long tile) {
    const long ld = steps * 64;
    int8_t* q = (int8_t*)own_scratch.get(ld * 16);
    memset(q, 0, ld * 16);
    for (int c = 0; c < 16; c++) {
      const long source = source_column(tile * 16 + c, n, silu_mul), place = tile / 2 * groups * kCols + tile % 2 * 16 + c;
      if (source >= 0) memcpy(q + c * ld, values + source * k, k);
      for (long i = 0; i < groups; i++) {
        const bool real = source >= 0 && i < given;
        scales[place + i * kCols] = to_bf16(real ? scale[source * given + i] : 0.f);
        if (offset) offsets[place + i * kCols] = to_bf16(real ? offset[source * given + i] : 0.f);
      }
    }
    pack_columns(data, bits, int(steps), tile / 2, int(tile % 2), q);
  });
}

// out[i, :k] = row ids[i] of the weight, in bf16: an embedding that shares the packed LM head.
void quire_quant_rows(const Quant* q, const long* ids, long num_ids, bf16* out, long ldo, long k) {
  parallel_for(num_ids, 4, [&](long i) {
    for (long kk = 0; kk < k; kk++) out[i * ldo + kk] = to_bf16(quant_value(*q, ids[i], int(kk)));
  });
}
}
