// LoRA in products on AMX: the product of the rows with A is computed once (the inner rows), then B adds to the sums of
// the layer's own product as further k-steps, before its activation and its rounding. Few rows and many take the same
// steps in the same order, so a row's bits do not depend on the others: tiles of rows without the adapter are skipped,
// and inner rows without it are zero.
//
// Inner values are float32. Each becomes the sum of two bf16 numbers, high and low, so that no more than 2^-16 of it is
// lost. An inner row has, for each 32 ranks of a module, 32 high and 32 low numbers; for the last 16 or fewer it has 16
// and 16, which make one k-step with a B that is repeated.
#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
#include "lora.h"

struct Linear;

// Like `add_lora`, for the adapters that have tiles. Returns false, with nothing done, if none has.
template <typename O>
bool add_lora_tiles(const LoraStep& step, const bf16* x, long ldx, O* out, long ldo);

// What adds to 16 columns of a packed product. b: tiles [wide + narrow][16][16][2]; null: nothing.
struct LoraColumns {
  const bf16* b;
  long inner;         // its first column of the inner rows
  long wide, narrow;  // numbers of k-steps of 32 and of 16 ranks
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
};

// What the adapters of a step that have tiles add to the product of x [step.end - step.begin, k] with one layer.
class LoraSums {
 public:
  LoraSums() = default;
  LoraSums(const LoraStep& step, const bf16* x, long ldx);
  explicit operator bool() const { return !spans_.empty(); }  // whether it adds anything

  // Adds to tiles 0 .. 3: the sums of rows 32 * pair .. and the columns of a block. Overwrites tiles 4 .. 6.
  void add(int pair, long block) const;
  // Prefetches what `add` reads of B.
  void fetch(long block) const;

 private:
  struct Pair {
    bf16* inner = nullptr;               // [32, width]; null: no row has the adapter
    bool upper = false, lower = false;   // whether one of the first 16 rows has it, and of the last 16
  };
  struct Span {
    const LoraTiles* tiles;
    std::vector<Pair> pairs;
  };
  std::vector<Span> spans_;
};

#if QUIRE_AMX
template <int T>
static inline void add_lora_tile(const LoraColumns& c, const bf16* inner, long width, bool upper, bool lower) {
  const auto multiply = [&](const bf16* left) {
    if (upper) {
      TILE_LOAD(4, left, width * 2);
      if (T == 0) TILE_DP(0, 4, 6);
      else TILE_DP(1, 4, 6);
    }
    if (lower) {
      TILE_LOAD(5, left + 16 * width, width * 2);
      if (T == 0) TILE_DP(2, 5, 6);
      else TILE_DP(3, 5, 6);
    }
  };
  const bf16 *b = c.b, *left = inner + c.inner;
  for (long s = 0; s < c.wide + c.narrow; s++, b += 512, left += 64) {
    TILE_LOAD(6, b, 64);
    multiply(left);
    if (s < c.wide) multiply(left + 32);
  }
}

inline void LoraSums::add(int pair, long block) const {
  for (const Span& s : spans_) {
    const Pair& p = s.pairs[pair];
    if (!p.inner || 2 * block >= s.tiles->num_columns) continue;
    const LoraColumns* c = s.tiles->columns + 2 * block;
    if (c[0].b) add_lora_tile<0>(c[0], p.inner, s.tiles->width, p.upper, p.lower);
    if (c[1].b) add_lora_tile<1>(c[1], p.inner, s.tiles->width, p.upper, p.lower);
  }
}

inline void LoraSums::fetch(long block) const {
  for (const Span& s : spans_)
    for (long i = 2 * block; i < std::min(2 * block + 2, s.tiles->num_columns); i++) {
      const LoraColumns& c = s.tiles->columns[i];
      for (long at = 0; c.b && at < (c.wide + c.narrow) * 512; at += 32) prefetch_l2(c.b + at);
    }
}
#endif
