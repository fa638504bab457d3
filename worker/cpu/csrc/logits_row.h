// A row of logits and the maximum of each of its blocks. Sampling and log-probabilities read the maxima first and then
// skip the blocks that cannot matter.
#pragma once

#include <algorithm>
#include <functional>

#include "simd.h"

namespace {

constexpr long kBlock = 128;  // logits of a block

class LogitsRow {
 public:
  static long blocks_of(long n) { return (n + kBlock - 1) / kBlock; }

  // `room` holds two floats per block.
  LogitsRow(const float* x, long n, float* room)
      : x_(x), n_(n), blocks_(blocks_of(n)), maxima_(room), order_(room + blocks_) {}

  // Computes the maxima. Returns false if a logit is NaN or the largest is infinite: such a row is invalid.
  bool scan() {
    bool nan = false;
    float buffer[kBlock];
    for (long b = 0; b < blocks_; b++) {
      const float* p = block(b, buffer);
      vf top = set1(kNegInf);
      for (long i = 0; i < kBlock; i += 32) {
        const vf u = load(p + i), v = load(p + i + 16);
        nan |= any_nan(u, v);
        top = max(top, max(u, v));
      }
      maxima_[b] = reduce_max(top);
    }
    maximum_ = *std::max_element(maxima_, maxima_ + blocks_);
    return !nan && std::isfinite(maximum_);
  }

  long first_largest() const {
    long i = (std::find(maxima_, maxima_ + blocks_, maximum_) - maxima_) * kBlock;
    while (x_[i] != maximum_) i++;
    return i;
  }

 protected:
  // Returns block b; `buffer` holds it, padded with -inf, if the row ends within the block.
  const float* block(long b, float* buffer) const {
    const float* p = x_ + b * kBlock;
    const long real = std::min(kBlock, n_ - b * kBlock);
    if (real == kBlock) return p;
    std::fill(std::copy(p, p + real, buffer), buffer + kBlock, kNegInf);
    return buffer;
  }

  // Returns a value that at least k logits reach: the k-th largest block maximum, or -inf with fewer than k blocks.
  float reached_by(long k) {
    if (k > blocks_) return kNegInf;
    std::copy(maxima_, maxima_ + blocks_, order_);
    std::nth_element(order_, order_ + k - 1, order_ + blocks_, std::greater<float>());
    return order_[k - 1];
  }

  const float* x_;
  long n_, blocks_;
  float *maxima_, *order_;
  float maximum_ = 0;
};

}  // namespace
