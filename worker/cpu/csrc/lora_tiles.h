// LoRA in products on AMX: the product of the rows with A is computed once (the inner rows), then B adds to the sums of
// the layer's own product as further k-steps, before its activation and its rounding. Few rows and many take the same
// steps in the same order, so a row's bits do not depend on the others: tiles of rows without the adapter are skipped,
// and inner rows without it are zero.
//
// Inner values are float32. Each becomes the sum of two bf16 numbers, high and low, so that no more than 2^-16 of it is
// lost. An inner row has, for each 32 ranks of a module, 32 high and 32 low numbers; for the last 16 or fewer it has 16
// and 16, which make one k-step with half a tile of B, repeated.
#pragma once

#include <cstring>
#include <vector>

#include "amx.h"
#include "lora.h"
#include "parallel.h"

struct Linear;

// Like `add_lora`, for the adapters that have tiles. Returns false, with nothing done, if none has.
template <typename O>
bool add_lora_tiles(const LoraStep& step, const bf16* x, long ldx, O* out, long ldo);

// What adds to 16 columns of a packed product. b: tiles [wide][16][16][2], then halves of tiles [narrow][8][16][2];
// null: nothing.
struct LoraColumns {
  const bf16* b;
  long inner;         // its first column of the inner rows
  long wide, narrow;  // numbers of k-steps of 32 and of 16 ranks
  long size() const { return b ? 512 * wide + 256 * narrow : 0; }
};

// A layer's matrices for products on AMX.
struct LoraTiles {
  const bf16* a;               // packed like a weight [rank, k], the last 16 or fewer ranks in a single tile per k-step
  const LoraColumns* columns;  // of the packed product
  long num_columns;            // their number, even
  long width;                  // of the inner rows
};

// The k-steps of a rank: of 32 ranks, and of the last 16 or fewer.
struct LoraSteps {
  long wide, narrow;
  explicit LoraSteps(long rank) : wide((rank + 15) / 32), narrow(rank % 32 > 0 && rank % 32 <= 16) {}
  long width() const { return 64 * wide + 32 * narrow; }  // columns of the inner rows
  long size() const { return 512 * wide + 256 * narrow; }  // of 16 columns of B
};

// What the adapters of a step that have tiles add to the product of x [step.end - step.begin, k] with one layer.
class LoraSums {
 public:
  LoraSums() = default;
  LoraSums(const LoraStep& step, const bf16* x, long ldx);
  explicit operator bool() const { return !spans_.empty(); }  // whether it adds anything

  struct Pair {
    bf16* inner = nullptr;              // [32, width]; null: no row has the adapter
    bool upper = false, lower = false;  // whether one of the first 16 rows has it, and of the last 16
  };
  struct Span {
    const LoraTiles* tiles;
    std::vector<Pair> pairs;
    // What adds to columns 16 i ..
    LoraColumns columns(long i) const { return i < tiles->num_columns ? tiles->columns[i] : LoraColumns{}; }
  };
  const std::vector<Span>& spans() const { return spans_; }

 private:
  std::vector<Span> spans_;
};

#if QUIRE_AMX

namespace {

// Prefetches in each of some steps a share of the tiles of B of a block.
class LoraFetch {
 public:
  LoraFetch(const LoraSums* sums, long block, int steps) : sums_(sums), block_(block) {
    long lines = 0;
    for (int i = 0; i < parts(); i++) lines += columns(i).size() / 32;
    each_ = (lines + steps - 1) / steps;
  }
  void step() {
    for (long i = 0; i < each_; i++, at_ += 32) {
      while (at_ == end_) {
        if (part_ == parts()) return;
        const LoraColumns c = columns(part_++);
        at_ = c.b, end_ = c.b + c.size();
      }
      prefetch_l1(at_);
    }
  }

 private:
  int parts() const { return sums_ ? int(sums_->spans().size()) * 2 : 0; }
  LoraColumns columns(int i) const { return sums_->spans()[i / 2].columns(2 * block_ + i % 2); }

  const LoraSums* sums_;
  long block_, each_;
  int part_ = 0;
  const bf16 *at_ = nullptr, *end_ = nullptr;
};

thread_local Scratch repeated_scratch;

// A thread's tiles of B for 32 columns, a block.
class LoraBlock {
 public:
  explicit LoraBlock(const LoraSums* sums)
      : sums_(sums), repeated_(sums ? (bf16*)repeated_scratch.get(sums->spans().size() * 4096) : nullptr) {}

  void open(long block) {
    block_ = block;
    bf16* to = repeated_;
    for (const auto& span : sums_->spans())
      for (int t = 0; t < 2; t++, to += 512) {
        const LoraColumns c = span.columns(2 * block + t);
        if (!c.b || !c.narrow) continue;
        memcpy(to, c.b + 512 * c.wide, 512);
        memcpy(to + 256, to, 512);
      }
  }

  // Adds to tiles 0 .. 3: the sums of rows 32 * pair .. and the columns of the block. Overwrites tiles 4 .. 6.
  void add(int pair) const {
    const bf16* repeated = repeated_;
    for (const auto& span : sums_->spans()) {
      const LoraSums::Pair& p = span.pairs[pair];
      if (p.inner) {
        add_tile<0>(span.columns(2 * block_), repeated, p, span.tiles->width);
        add_tile<1>(span.columns(2 * block_ + 1), repeated + 512, p, span.tiles->width);
      }
      repeated += 1024;
    }
  }

 private:
  template <int T>
  static void add_tile(const LoraColumns& c, const bf16* repeated, const LoraSums::Pair& p, long width) {
    if (!c.b) return;
    const auto multiply = [&](const bf16* left) {
      if (p.upper) {
        TILE_LOAD(4, left, width * 2);
        if (T == 0) TILE_DP(0, 4, 6);
        else TILE_DP(1, 4, 6);
      }
      if (p.lower) {
        TILE_LOAD(5, left + 16 * width, width * 2);
        if (T == 0) TILE_DP(2, 5, 6);
        else TILE_DP(3, 5, 6);
      }
    };
    const bf16* left = p.inner + c.inner;
    for (long s = 0; s < c.wide; s++, left += 64) {
      TILE_LOAD(6, c.b + 512 * s, 64);
      multiply(left);
      multiply(left + 32);
    }
    if (!c.narrow) return;
    TILE_LOAD(6, repeated, 64);
    multiply(left);
  }

  const LoraSums* sums_;
  bf16* repeated_;  // [spans][2][16][16][2]
  long block_ = 0;
};

}  // namespace
#endif
