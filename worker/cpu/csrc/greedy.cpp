// argmax of each row of logits without computing all of them: the same result, but reads little more than 8 bits of
// each weight.
//
// The output head has an additional copy that is rounded to 8 bits. With a row h = h' + d, h' of 16 or 8 bits, and a
// weight w = w' + e, h w is at most h' w' + |d| |w'| + |h| |e| (Cauchy-Schwarz); all norms are known beforehand. One
// pass over the copy yields an upper bound (limit) for each block of 32 logits. For each row the block with the highest
// limit is computed exactly, then all blocks whose limits reach the largest logit found there: for random weights a few
// in a thousand. All other logits are smaller.
#include <climits>
#include <vector>

#include "greedy_amx.h"
#include "greedy_vector.h"

namespace {

// Returns a block of the weight as packed k-steps, expanded into `room` if the weight is compact.
const bf16* packed_block(const Gemm& g, int nb, bf16* room) {
  if (!g.compact) return g.block(nb);
  const uint64_t* exceptions = g.compact->exceptions_from(nb, 0);
  for (int s = 0; s < g.k_steps(); s++) expand_step<false>(*g.compact, nb, s, exceptions, room + s * kStepElems);
  return room;
}

struct Best {  // argmax of each row so far; the lowest index wins ties
  float value[kMostGreedy];
  int index[kMostGreedy];
  bool nan = false;
  Best() { std::fill(value, value + kMostGreedy, kNegInf), std::fill(index, index + kMostGreedy, INT_MAX); }
  void take(int row, float v, int i) {
    if (v > value[row] || (v == value[row] && i < index[row])) value[row] = v, index[row] = i;
  }
};

struct Wanted {  // logits to compute: those of block nb, for the rows whose bits are set
  int nb;
  uint32_t rows;
};

class Greedy {
 public:
  Greedy(const Gemm& g, const float* limits)
      : g_(g), logits_(g), limits_(limits), ld_(limits_ld(g.m)), done_(g.n_blocks()) {}

  // Computes the blocks that may hold a row's largest logit; returns the number of blocks.
  long find() {
    const std::vector<Wanted> likely = highest();
    compute(likely);
    const std::vector<Wanted> others = reached();
    compute(others);
    return long(likely.size() + others.size());
  }
  const Best& best() const { return best_; }

 private:
  // Returns each row's block with the highest limit.
  std::vector<Wanted> highest() {
    std::vector<Wanted> blocks;
    for (int r0 = 0; r0 < g_.m; r0 += 16) {
      float top[16];
      int at[16] = {};
      std::copy(limits_ + r0, limits_ + r0 + 16, top);
      for (int nb = 1; nb < g_.n_blocks(); nb++) {
        const float* limit = limits_ + nb * ld_ + r0;
        for (int r = 0; r < 16; r++)
          at[r] = limit[r] > top[r] ? nb : at[r], top[r] = limit[r] > top[r] ? limit[r] : top[r];
      }
      for (int r = 0; r < std::min(16, g_.m - r0); r++) {
        if (!done_[at[r]]) blocks.push_back({at[r], 0});
        done_[at[r]] |= 1u << (r0 + r);
      }
    }
    for (Wanted& block : blocks) block.rows = done_[block.nb] = logits_.computed(done_[block.nb]);
    return blocks;
  }

  // Returns the remaining blocks, with the rows whose limits are not below the largest logits found for them.
  std::vector<Wanted> reached() const {
    std::vector<Wanted> blocks;
    for (int nb = 0; nb < g_.n_blocks(); nb++) {
      const float* limit = limits_ + nb * ld_;
      uint32_t rows = 0;
      for (int r = 0; r < g_.m; r++) rows |= uint32_t(!(limit[r] < best_.value[r])) << r;
      if (rows &= ~done_[nb]) blocks.push_back({nb, logits_.computed(rows)});
    }
    return blocks;
  }

  void compute(const std::vector<Wanted>& blocks) {
    std::vector<Best> found(Pool::get().threads());
    Stretches stretches(long(blocks.size()), Pool::get().threads());
    Pool::get().run([&] {
      logits_.run([&] {
        for (long i, own = stretches.own(); stretches.take(own, i);) add(blocks[i], found[Pool::thread()]);
      });
    });
    for (const Best& b : found) {
      best_.nan |= b.nan;
      for (int r = 0; r < g_.m; r++) best_.take(r, b.value[r], b.index[r]);
    }
  }

  void add(Wanted wanted, Best& best) const {
    const auto [nb, rows] = wanted;
    alignas(64) float logits[kMostGreedy][kCols];
    Gemm here = g_;
    here.out = &logits[0][0] - nb * kCols, here.ldo = kCols;
    for (auto& row : logits) std::fill(row, row + kCols, kNegInf);  // the last block may have fewer
    logits_.block(here, nb, rows);
    for (int r = 0; r < g_.m; r++) {
      if (!(rows >> r & 1)) continue;
      const vf a = load(logits[r]), b = load(logits[r] + 16);
      const float top = reduce_max(max(a, b));
      best.nan |= any_nan(a, b);
      if (top >= best.value[r])
        best.take(r, top, nb * kCols + int(std::find(logits[r], logits[r] + kCols - 1, top) - logits[r]));
    }
  }

  const Gemm& g_;
  const Logits logits_;
  const float* limits_;
  const long ld_;
  std::vector<uint32_t> done_;  // rows of each block that are computed
  Best best_;
};

thread_local Scratch block_limits;

}  // namespace

extern "C" {

// Makes the 8-bit copy of a weight [n, k], packed or compact; k is a multiple of 64. Returns false if a weight is not
// finite.
bool quire_screen_make(const bf16* packed, const Compact* compact, const Screen* screen, long n, long k) {
  const Gemm g{nullptr, 0, packed, nullptr, nullptr, 0, 0, int(n), int(k), 1, 0, nullptr, compact};
  std::atomic<bool> finite{true};
  parallel_for(g.n_blocks(), 16, [&](long nb) {
    const bf16* block = packed_block(g, int(nb), (bf16*)own_scratch.get(k * kCols * sizeof(bf16)));
    if (!round_block(g, *screen, int(nb), block)) finite = false;
  });
  return finite;
}

// Fills what the screen holds about the columns of a weight [n, k] of 8 bits per value, of which it then needs no copy.
// Returns false if a scale is not finite, or this CPU has no products of bytes.
bool quire_screen_measure(const Quant* q, const Screen* screen, long n) {
#if defined(__AVX512F__) && !QUIRE_AMX
  std::atomic<bool> finite{true};
  parallel_for((n + kCols - 1) / kCols, 16, [&](long nb) {
    if (!measure_block(*q, *screen, int(nb))) finite = false;
  });
  return finite;
#else
  return false;
#endif
}

// ids[r] = argmax of the logits x[r] W^T (first index on ties), for x [m, k] with m <= 32 and a weight with its copy,
// or that was measured. Returns the number of computed blocks of 32 logits, or -1 if a candidate logit is not finite;
// the caller decides.
long quire_greedy(const bf16* x, long ldx, const bf16* packed, const Compact* compact, const Quant* quant,
                  const Screen* screen, int64_t* ids, long m, long n, long k) {
  const Gemm g{x, ldx, packed, nullptr, nullptr, 0, int(m), int(n), int(k), 1, 0, quant, compact};
  float* limits = (float*)block_limits.get(g.n_blocks() * limits_ld(m) * sizeof(float));
  find_limits(g, *screen, limits);
  Greedy greedy(g, limits);
  const long computed = greedy.find();
  bool finite = !greedy.best().nan;
  for (int r = 0; r < m; r++) ids[r] = greedy.best().index[r], finite &= std::isfinite(greedy.best().value[r]);
  return finite ? computed : -1;
}
}
