// The activation of gated layers whose product is computed without it, because adapters add to the gate and up first.
#pragma once

#include "gemm.h"
#include "parallel.h"

namespace {

// The layer without its activation: columns as `activate_rows` reads them.
inline Linear ungated(const Linear& linear) {
  Linear both = linear;
  both.n = quire_gemm_packed_columns(linear.n, 1), both.gated = 0;
  return both;
}

// Applies the activation to halves [rows, 2 * width], which are interleaved like a packed weight: 16 columns of the
// gate, 16 of up.
inline void activate_rows(int kind, const float* halves, long ldh, bf16* out, long ldo, long rows, long width) {
  parallel_for(rows, std::max(1L, (1L << 15) / width), [&](long r) {
    const float* from = halves + r * ldh;
    for (long i = 0; i < width; i += 16) {
      alignas(32) bf16 values[16];
      store(values, activate(kind, load(from + 2 * i), load(from + 2 * i + 16)));
      memcpy(out + r * ldo + i, values, std::min(16L, width - i) * sizeof(bf16));
    }
  });
}

}  // namespace
