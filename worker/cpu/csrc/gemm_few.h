// Products of few rows on AMX, which read the weight at memory speed: up to 32 rows in bf16, or integer products if the
// weight is quantized.
#pragma once

#include "gemm.h"
#include "lora_tiles.h"

#if QUIRE_AMX

namespace {

// Multiplies up to 32 rows by 32 columns. x is row-major and padded to whole k-steps. A compact weight is expanded two
// steps before its use, so that tile loads do not wait for lines still in flight to L1.
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
  LoraFetch adapters(g.lora, g.lora_block + nb, steps);
  TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
  if (COMPACT) for (int s = 0; s < kAhead; s++) fetch(s);
  for (int s = 0; s < steps; s++) {
    fetch(s + kAhead);
    adapters.step();
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
  if (g.lora) {
    LoraBlock adds(g.lora);
    adds.open(g.lora_block + nb);
    adds.add(0);
  }
  if (g.m > 16) { TILE_STORE(2, c[2], 64); TILE_STORE(3, c[3], 64); }
  TILE_STORE(0, c[0], 64); TILE_STORE(1, c[1], 64);
  for (int r = 0; r < g.m; r++)
    finish_row(g, r, nb * kCols, load(c[r / 16 * 2][r % 16]), load(c[r / 16 * 2 + 1][r % 16]));
}

inline void run_few_rows(const Gemm& g, int threads) {
  const PaddedRows x(g, kStep);
  over_blocks(g, threads, [&](auto&& each) {
    TileScope tiles(std::min(g.m, 16), 64, g.m - 16 > 0 ? g.m - 16 : 0);
    if (g.compact) each([&](int nb) { amx_few_rows_block<true>(g, x.rows, x.ld, nb); });
    else each([&](int nb) { amx_few_rows_block<false>(g, x.rows, x.ld, nb); });
  });
}

// Maximum rows for AMX integer products; above that, expanding the weight costs less than scaling the sums
constexpr int kMaxQuantRows = 32;

// Returns the rows of g.x as integers, padded with zero rows from g.m to `rows`. All threads share the memory.
inline QuantRows quant_rows(const Gemm& g, int rows) {
  QuantRows x((char*)shared_scratch.get(QuantRows::bytes(rows, *g.quant)), rows, *g.quant);
  parallel_for(rows, 4, [&](long r) { x.fill(r, r < g.m ? g.x + r * g.ldx : nullptr, g.k); });
  return x;
}

inline void run_quant_rows(const Gemm& g, int threads) {
  const Quant& q = *g.quant;
  const QuantRows x = quant_rows(g, (g.m + 15) / 16 * 16);
  over_blocks(g, threads, [&](auto&& each) {
    TileScope tiles(std::min(g.m, 16), std::min(q.group, 64));
    each([&](int nb) {
      alignas(64) float y[kMaxQuantRows][32];
      for (int r0 = 0; r0 < g.m; r0 += kMaxQuantRows) {
        const int n = std::min(kMaxQuantRows, g.m - r0);
        amx_quant_block(q, x, r0, n, nb, y);
        for (int r = 0; r < n; r++) finish_row(g, r0 + r, nb * kCols, load(y[r]), load(y[r] + 16));
      }
    });
  });
}

}  // namespace

#endif
