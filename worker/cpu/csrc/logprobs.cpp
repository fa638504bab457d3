// Log-probabilities of a given token and of the most likely tokens in each row of logits, and the given token's rank.
// The twin is `entries` in worker/sampling/logprobs.py.
#include <utility>
#include <vector>

#include "logits_row.h"
#include "old_glibc.h"
#include "parallel.h"

namespace {

thread_local Scratch scratch;
thread_local std::vector<std::pair<float, long>> candidates;

class Row : public LogitsRow {
 public:
  Row(const float* x, long n) : LogitsRow(x, n, (float*)scratch.get(2 * blocks_of(n) * sizeof(float))) {}

  long rank(float value) const {
    long above = 0;
    for (long b = 0; b < blocks_; b++)
      if (maxima_[b] > value)
        for (const float *p = x_ + b * kBlock, *end = std::min(p + kBlock, x_ + n_); p < end; p++) above += *p > value;
    return above + 1;
  }

  // Writes the `num` largest logits in descending order; ties are in order of token id.
  void largest(long num, long* ids, float* values) {
    if (num == 0) return;
    const float least = reached_by(num);
    candidates.clear();
    for (long b = 0; b < blocks_; b++)
      if (maxima_[b] >= least)
        for (long i = b * kBlock, end = std::min(i + kBlock, n_); i < end; i++)
          if (x_[i] >= least) candidates.push_back({-x_[i], i});
    std::nth_element(candidates.begin(), candidates.begin() + num - 1, candidates.end());
    std::sort(candidates.begin(), candidates.begin() + num);
    for (long i = 0; i < num; i++) ids[i] = candidates[i].second, values[i] = -candidates[i].first;
  }

  // Returns log(sum(exp(x))). The order of summation is fixed.
  double log_normalizer() const {
    double total = 0;
    float buffer[kBlock];
    for (long b = 0; b < blocks_; b++) {
      const float* p = block(b, buffer);
      vf sum = zero();
      for (long i = 0; i < kBlock; i += 16) sum = sum + exp_exact(max(load(p + i) - set1(maximum_), set1(-80.f)));
      total += reduce_add(sum);
    }
    return maximum_ + std::log(total);
  }
};

}  // namespace

extern "C" {

// For each row i of logits [num_rows, n] (row stride ld), writes the ids and values [num_rows, 1 + num] of tokens[i]
// followed by the num largest logits, and the rank of tokens[i]. Values are log-probabilities, or the raw logits
// without `normalize`. All values of a row are NaN if one of its logits is NaN or the largest is infinite.
void quire_logprobs(const float* logits, long ld, long num_rows, long n, const long* tokens, long num, int normalize,
                    long* ids, float* values, long* ranks) {
  parallel_for(num_rows, 1, [&](long i) {
    Row row(logits + i * ld, n);
    long* id = ids + i * (1 + num);
    float* value = values + i * (1 + num);
    std::fill(id, id + 1 + num, 0);
    std::fill(value, value + 1 + num, std::numeric_limits<float>::quiet_NaN());
    id[0] = tokens[i];
    ranks[i] = 1;
    if (!row.scan()) return;
    value[0] = logits[i * ld + tokens[i]];
    ranks[i] = row.rank(value[0]);
    row.largest(num, id + 1, value + 1);
    if (!normalize) return;
    const double log = row.log_normalizer();
    for (long j = 0; j <= num; j++) value[j] = float(value[j] - log);
  });
}
}
