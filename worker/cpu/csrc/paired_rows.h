// The left operand of products of many rows on AMX.
#pragma once

#include "gemm.h"

#if QUIRE_AMX

namespace {

// The rows of x in place, except those that must be padded to whole k-steps or whole pairs of tiles, which are copied.
class PairedRows {
 public:
  explicit PairedRows(const Gemm& g) : g_(g), ld_(g.ldx), rows_(g.x), whole_(g.m / 32) {
    const long width = long(g.k_steps()) * kStep;
    if (g.k != width || g.ldx * 2 % 4096 == 0) whole_ = 0;
    if (whole_ * 32 == g.m) return;
    tail_ld_ = width + kStep;  // not a multiple of 4 KiB, which would map a tile's rows to the same few cache sets
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
  long whole_;  // pairs of tiles that are used in place
};

}  // namespace
#endif
