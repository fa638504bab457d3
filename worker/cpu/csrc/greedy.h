// What the ways to find the largest logits (greedy_amx.h, greedy_avx2.h) have in common.
#pragma once

#include "gemm.h"

namespace {

constexpr long kGreedyPiece = 4;   // blocks that a thread takes at a time

// The copy: [columns / 32][k / 64][2 tiles of 16 columns][16][16 columns][4 k]; bytes with a sign for AMX, 128 more for AVX2.
struct Screen {
  int8_t* data;
  float* columns;  // [columns / 32][scale, norm of what is rounded, norm of what rounding took away][32]
  long k_steps;    // of 64
  int8_t* step(long nb, long s) const { return data + (nb * k_steps + s) * 2048; }
  float* about(long nb) const { return columns + nb * 3 * kCols; }
};

inline long limits_ld(long rows) { return (rows + 15) / 16 * 16; }  // of the limits, [blocks][rows]

// Sums of k products in float32, of the copy and where they are computed as always, may be off by k * 2^-24 of the product of the norms each; twice that covers these norms,
// too. This much of a column's norm is added to what rounding took away.
inline float slack_of(long k) { return float(k) * 0x1p-22f; }

thread_local Scratch rounded_rows;

}  // namespace
