// Code shared by the matrix products (gemm_few.h, gemm_many.h, gemm_vector.h, gemm_fixed.h): the description of a
// product and the epilogue of a row of sums.
#pragma once

#include <algorithm>

#include "amx.h"
#include "compact.h"
#include "kernels.h"
#include "parallel.h"
#include "quant_amx.h"
#include "simd.h"

namespace {

constexpr int kCols = 32;                   // columns of a block
constexpr int kStep = 32;                   // k of a step
constexpr int kStepElems = kCols * kStep;   // 2 KiB of weight
constexpr int kMostGreedy = 32;             // maximum rows of a step that needs only the largest logits (greedy.cpp)

struct Gemm {
  const bf16* x;
  long ldx;
  const bf16* packed;
  const float* bias;  // may be null
  void* out;
  long ldo;
  int m, n, k;
  int out_f32, gated;  // out_f32: 0 bf16, 1 float32 logits, 2 other float32; gated: an `Activation`
  const Quant* quant = nullptr;  // replaces `packed`, as does `compact`
  const Compact* compact = nullptr;
  const Sink* sink = nullptr;  // replaces `out`; only for products of many rows
  const LoraSums* lora = nullptr;  // is added to the sums, if they are those of tiles of bf16
  long lora_block = 0;             // the block of `lora` that belongs to block 0

  int k_steps() const { return quant ? 2 * quant->k_steps : (k + kStep - 1) / kStep; }
  int n_blocks() const { return (n + kCols - 1) / kCols; }
  const bf16* block(int nb) const { return packed + size_t(nb) * k_steps() * kStepElems; }
  long block_bytes() const {
    return quant ? quant->k_steps * quant->step_bytes()
                 : long(k_steps()) * 2 * (compact ? Compact::kStepWords : kStepElems);
  }
};

// The activation of a product whose columns are a gate and, in equal number, up. Numbered as in worker/cpu/ops.py.
enum Activation { kNotGated, kSilu, kGeluTanh, kClampedSilu };
inline vf activate(int kind, vf gate, vf up) {
  if (kind == kSilu) return silu(gate) * up;
  if (kind == kGeluTanh) return gelu_tanh(gate) * up;
  const vf limit = set1(7.f);  // gpt-oss
  gate = min(gate, limit), up = max(min(up, limit), zero() - limit);
  return gate / (set1(1.f) + exp(min(gate * set1(-1.702f), set1(87.f)))) * (up + set1(1.f));
}

// Writes columns n0..n0+31 of one row, given as two vectors of sums: applies the scale, the bias and the activation.
inline void finish_row(const Gemm& g, int row, int n0, vf a, vf b) {
  if (g.compact) a = a * set1(g.compact->scales[n0 / kCols]), b = b * set1(g.compact->scales[n0 / kCols]);
  if (g.gated) {  // tile 0 holds the gate, tile 1 the matching columns of up
    int n1 = n0 / 2, width = std::min(16, g.n / 2 - n1);
    bf16* p = (bf16*)g.out + row * g.ldo + n1;
    if (g.bias) a = a + load(g.bias + n0), b = b + load(g.bias + n0 + 16);
    vf r = activate(g.gated, a, b);
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

thread_local Scratch shared_scratch, own_scratch;

// The rows of x if k is a multiple of `step`, else a copy padded with zeros to whole k-steps of the weight.
struct PaddedRows {
  const bf16* rows;
  long ld;
  PaddedRows(const Gemm& g, int step) : rows(g.x), ld(g.ldx) {
    if (g.k % step == 0) return;
    ld = long(g.k_steps()) * kStep;
    bf16* copy = (bf16*)shared_scratch.get(g.m * ld * 2);
    for (int r = 0; r < g.m; r++) {
      memcpy(copy + r * ld, g.x + r * g.ldx, g.k * 2);
      memset(copy + r * ld + g.k, 0, (ld - g.k) * 2);
    }
    rows = copy;
  }
};

// Returns the number of blocks per piece: up to 128 KiB, but at least four pieces per thread, of `products` products.
inline long blocks_per_piece(const Gemm& g, int threads, long products = 1) {
  const long by_size = std::max(1L, (128L << 10) / g.block_bytes());
  return std::max(1L, std::min(by_size, g.n_blocks() * products / (4L * threads)));
}

// Calls work(each) in every thread; each(f) calls f with the index of each block of the thread, `per` neighbours at a
// time.
template <typename W>
void over_blocks(const Gemm& g, int threads, long per, W&& work) {
  Stretches pieces((g.n_blocks() + per - 1) / per, threads);
  Pool::get().run([&] {
    const int own = pieces.own();
    work([&](auto&& block) {
      for (long i; pieces.take(own, i);)
        for (int nb = int(i * per), end = std::min(int(nb + per), g.n_blocks()); nb < end; nb++) block(nb);
    });
  });
}
template <typename W>
void over_blocks(const Gemm& g, int threads, W&& work) {
  over_blocks(g, threads, blocks_per_piece(g, threads), work);
}

}  // namespace
