// A row of logits and the maximum of every block of it: what sampling and log-probabilities look at first, and what tells them where they need not look again.
#pragma once

#include <algorithm>
#include <functional>

#include "simd.h"

namespace {

constexpr long kBlock = 128;  // logits of a block

class LogitsRow {
 public:
  static long blocks_of(long n) { return (n + kBlock - 1) / kBlock; }

  // `room` for twice as many floats as there are blocks.
  LogitsRow(const float* x, long n, float* room) : x_(x), n_(n), blocks_(blocks_of(n)), maxima_(room), order_(room + blocks_) {}

  // Finds the maxima. False where a logit is NaN, or the largest is infinite: such a row means nothing.
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
  // Block b, filled up with -inf where the row ends.
  const float* block(long b, float* buffer) const {
    const float* p = x_ + b * kBlock;
    const long real = std::min(kBlock, n_ - b * kBlock);
    if (real == kBlock) return p;
    std::fill(std::copy(p, p + real, buffer), buffer + kBlock, kNegInf);
    return buffer;
  }

  // A value that at least k logits reach: the k-th largest of the maxima, or -inf where there are fewer.
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
