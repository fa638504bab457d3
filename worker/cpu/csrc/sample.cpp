// Samples one token per row of logits: the argmax (lowest id on ties), or a random draw after temperature, min-p, top-k
// and top-p.
//
// The twin, worker/sampling/arithmetic.py, explains the arithmetic: weights w = exp((x - max) / temperature) become
// integers q = floor(w * 2^40); filters are thresholds on w; the token is the first at which the running sum of q
// exceeds floor(uniform * total). Integer sums are exact in any order, so vectors and tiles may compute them, and a
// row's token depends only on the row. Only the last bit of exp may differ from the twin's.
//
// A thread processes one row at a time, which stays in its L2. The first pass computes the maximum of every block.
// Later passes skip the blocks in which every weight is below the threshold, so they read little of a row that has a
// filter or a clear favourite.
#include "logits_row.h"
#include "old_glibc.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr long kTileBlocks = 32;                // blocks per tile; each tile has its own sum
constexpr float kScale = 1 << 20;               // weights become integers in two steps of 20 bits, exact in float32
constexpr float kLeast = 1.f / kScale / kScale; // smaller weights count as 0
constexpr float kFarBelow = -30.f;              // e^this is less than kLeast

// Sixteen floats truncated to 32-bit integers.
constexpr int kWholeParts = 16 / kLanes;
struct Whole { Ints parts[kWholeParts]; };
Whole truncated(vf x) {
  Whole y;
  for (int i = 0; i < kWholeParts; i++) y.parts[i] = ::truncated(part(x, i));
  return y;
}
vf to_float(Whole x) {
  Floats parts[kWholeParts];
  for (int i = 0; i < kWholeParts; i++) parts[i] = to_floats(x.parts[i]);
  return whole(parts);
}
Whole operator+(Whole x, Whole y) {
  for (int i = 0; i < kWholeParts; i++) x.parts[i] = add_ints(x.parts[i], y.parts[i]);
  return x;
}
void store(int32_t* p, Whole x) {
  for (int i = 0; i < kWholeParts; i++) store_ints(p + i * kLanes, x.parts[i]);
}

struct Sampling {
  float temperature, min_p;
  double top_p;
  long top_k;
  double uniform;
};

uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// Returns a uniform number in [0, 1) by SplitMix64, as `uniform` in worker/sampling/arithmetic.py does.
double uniform(uint64_t state, uint64_t position) {
  uint64_t z = state + (position + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return double((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// Returns the largest t for which the number of weights >= t, or the sum of their q if `amounts`, is at least `needed`.
// All weights together must reach `needed`. Overwrites `weights`. Computes histograms over the weights' bits, from the
// highest to the lowest: positive floats sort like their bits.
float kth_weight(float* weights, long n, int64_t needed, bool amounts) {
  const uint32_t base = bits_of(kLeast);
  uint32_t found = 0;
  for (const auto& [shift, bits] : {std::pair{19, 10}, {9, 10}, {0, 9}}) {
    int64_t histogram[1 << 10] = {};
    const uint32_t mask = (1u << bits) - 1;
    auto bin = [&, shift = shift](float w) { return ((bits_of(w) - base) >> shift) & mask; };
    for (long i = 0; i < n; i++) histogram[bin(weights[i])] += amounts ? int64_t(weights[i] * (kScale * kScale)) : 1;
    uint32_t reached = mask;
    while (reached > 0 && histogram[reached] < needed) needed -= histogram[reached--];
    found |= reached << shift;
    long kept = 0;
    for (long i = 0; i < n; i++) {
      const float w = weights[i];
      weights[kept] = w;
      kept += bin(w) == reached;
    }
    n = kept;
  }
  return float_of(found + base);
}

// Computes exp((x - maximum) / temperature). The quotient equals a division's except for a last bit in rare cases: its
// error is computed exactly and then multiplied by the inverse, too.
struct Weigh {
  vf maximum, divisor, inverse, floor;
  Weigh(float maximum, float temperature)
      : maximum(set1(maximum)),
        divisor(set1(temperature)),
        inverse(set1(1.f / temperature)),
        floor(set1(kFarBelow * temperature)) {}
  vf operator()(vf x) const {
    const vf d = max(x - maximum, floor), quotient = d * inverse;
    return exp_exact(fma(fma(zero() - quotient, divisor, d), inverse, quotient));
  }
};

thread_local Scratch scratch;

class Row : public LogitsRow {
 public:
  Row(const float* x, long n) : LogitsRow(x, n, room(n)), tiles_((blocks_ + kTileBlocks - 1) / kTileBlocks) {
    weights_ = order_ + blocks_;
    sums_ = (int64_t*)(weights_ + blocks_ * kBlock + 16);
  }

  long draw(const Sampling& s) {
    temperature_ = s.temperature;
    float least = std::min(std::max(s.min_p, 0.f), 1.f);
    if (s.top_k > 0) least = std::max(least, kth_largest(s.top_k));
    if (s.top_p < 1) least = std::max(least, nucleus(s.top_p, least));
    const int64_t total = sum(least);
    int64_t target = std::min(int64_t(s.uniform * double(total)), total - 1);
    long tile = 0;
    for (; target >= sums_[tile]; tile++) target -= sums_[tile];
    for (long b = tile * kTileBlocks;; b++) {
      float w[kBlock];
      weights_of(b, least, w);
      for (long i = 0; i < kBlock; i++) {
        target -= int64_t(w[i] * (kScale * kScale));
        if (target < 0) return b * kBlock + i;
      }
    }
  }

 private:
  static float* room(long n) {
    const long blocks = blocks_of(n);
    return (float*)scratch.get((2 * blocks + blocks * kBlock + 16) * sizeof(float) +
                               (blocks / kTileBlocks + 1) * sizeof(int64_t));
  }

  // Returns a bound: a logit below it has a weight below `least`, rounding errors included.
  float logit_below(float least) const {
    const double log = temperature_ * std::log(double(std::max(least, kLeast)));
    return float(maximum_ + log - 1e-5 * temperature_ - 1e-6 * (std::abs(maximum_) - log));
  }

  void weights_of(long b, float least, float* w) const {
    float buffer[kBlock];
    const float* p = block(b, buffer);
    const Weigh weight(maximum_, temperature_);
    for (long i = 0; i < kBlock; i += 16) store(w + i, zero_below(weight(load(p + i)), set1(least)));
  }

  // Returns the sum of q over the weights >= `least`, and stores each tile's sum in sums_.
  int64_t sum(float least) {
    const float low = logit_below(least);
    const Weigh weight(maximum_, temperature_);
    int64_t total = 0;
    for (long tile = 0; tile < tiles_; tile++) {
      Whole high = truncated(zero()), rest = high;  // at most 256 * 2^20 per lane
      for (long b = tile * kTileBlocks, end = std::min(b + kTileBlocks, blocks_); b < end; b++) {
        if (maxima_[b] < low) continue;
        float buffer[kBlock];
        const float* p = block(b, buffer);
        for (long i = 0; i < kBlock; i += 16) {
          const vf w = zero_below(weight(load(p + i)), set1(least)) * set1(kScale);
          const Whole whole = truncated(w);
          high = high + whole;
          rest = rest + truncated((w - to_float(whole)) * set1(kScale));
        }
      }
      int32_t h[16], r[16];
      store(h, high);
      store(r, rest);
      int64_t in_tile = 0;
      for (int i = 0; i < 16; i++) in_tile += (int64_t(h[i]) << 20) + r[i];
      total += sums_[tile] = in_tile;
    }
    return total;
  }

  // Copies all weights >= `least` to weights_ and returns their number. `least` must be at least kLeast.
  long collect(float least) {
    const float low = logit_below(least);
    const Weigh weight(maximum_, temperature_);
    long n = 0;
    for (long b = 0; b < blocks_; b++) {
      if (maxima_[b] < low) continue;
      float buffer[kBlock];
      const float* p = block(b, buffer);
      for (long i = 0; i < kBlock; i += 16) n += append_not_below(weights_ + n, weight(load(p + i)), set1(least));
    }
    return n;
  }

  // Returns the k-th largest weight, at least kLeast.
  float kth_largest(long k) {
    float w[16];
    store(w, Weigh(maximum_, temperature_)(set1(reached_by(k))));
    const float least = std::max(kLeast, w[0] * 0.99999f);  // exp may not be monotonic in the last bit
    const long n = collect(least);
    return n < k ? kLeast : kth_weight(weights_, n, k, false);
  }

  // Returns the smallest weight of the nucleus: the fewest largest weights whose sum is at least `top_p` times the sum
  // of all weights >= `least`. The weights below (1 - top_p) times the mean sum to less than 1 - top_p of the total, so
  // none of them is in the nucleus.
  float nucleus(double top_p, float least) {
    const int64_t total = sum(least),
                  needed = std::min(std::max(int64_t(std::ceil(double(total) * top_p)), int64_t(1)), total);
    const double bound = 0.99 * (1 - top_p) * double(total) / double(n_) * kLeast;
    return kth_weight(weights_, collect(std::max({least, kLeast, float(bound)})), needed, true);
  }

  long tiles_;
  float* weights_;  // room for a row's weights and one more vector
  int64_t* sums_;   // sum of q per tile
  float temperature_ = 1;
};

}  // namespace

extern "C" {

// Samples token_ids[i] from row i of logits [num_rows, n] (row stride ld), for position positions[i] of the request in
// row rows[i] of the tables. The token is -1 if a logit is NaN or the largest is infinite.
// floats: temperature (0: argmax), top_p (1: off) and min_p, each [max_rows], concatenated.
// ints: top_k (0: off) and the seed state, each [max_rows], concatenated.
void quire_sample(const float* logits, long ld, long num_rows, long n, const long* rows, const long* positions,
                  const double* floats, const long* ints, long max_rows, long* token_ids) {
  parallel_for(num_rows, 1, [&](long i) {
    const long r = rows[i];
    Row row(logits + i * ld, n);
    if (!row.scan()) token_ids[i] = -1;
    else if (floats[r] == 0) token_ids[i] = row.first_largest();
    else
      token_ids[i] = row.draw({float(floats[r]), float(floats[2 * max_rows + r]), floats[max_rows + r], ints[r],
                               uniform(uint64_t(ints[max_rows + r]), uint64_t(positions[i]))});
  });
}
}
