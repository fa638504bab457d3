// Products of few rows, which read the weight at the speed of memory: by AMX up to 32 rows, as integers up to 32 where the weight is quantized, and by vectors any number.
#pragma once

#include "gemm.h"

namespace {

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
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++)
      for (int r = 0; r < ROWS; r++) {
        uint32_t v = pair_at(r, s * 16 + p);
        if (r == 0) read_ahead(w + p * 32), read_ahead(w + kStepElems / 2 + p * 32);
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
  const uint64_t* exceptions = COMPACT ? g.compact->exceptions_from(nb, 0) : nullptr;
  auto fetch = [&](int s) {
    if constexpr (COMPACT) {
      if (s >= steps) return;
      expand_step<true>(*g.compact, nb, s, exceptions, ring[s % (2 * kAhead)]);
    } else {
      for (int i = 0; i < kStepElems; i += 32) read_ahead(packed + (s - kAhead) * kStepElems + i);
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

inline int pieces_of(const Gemm& g, int threads, long bytes_per_block) {  // blocks per piece: up to 128 KiB, but at least four pieces a thread
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
    const int own = pieces.own();
    work([&](auto&& block) {
      for (long i; pieces.take(own, i);)
        for (int nb = int(i * per), end = std::min(int(nb + per), g.n_blocks()); nb < end; nb++) block(nb);
    });
  });
}

inline void run_few_rows(const Gemm& g, int threads, bool amx) {
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

inline void run_quant_rows(const Gemm& g, int threads, bool amx) {
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

}  // namespace
