// The experts of a mixture-of-experts layer: each token is multiplied by the experts chosen for it, and the results are
// summed by weight. Rows are sorted by expert, so that the weights of each expert that has rows are read once per call,
// those of other experts not at all.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace {

// Maximum rows (token and expert pairs) at a time, so that the memory for them is bounded
constexpr long kMostPairs = 16384;

thread_local Scratch scratch;

// The pairs of `tokens` tokens sorted by expert.
struct Sorted {
  std::vector<LinearRows> gate_up, down;  // of the experts that have rows
  std::vector<long> pair_of;              // row -> token * top_k + j
  std::vector<long> row_of;               // the inverse; -1 for an expert that is not here

  Sorted(const Experts& e, const int64_t* ids, long tokens) : row_of(tokens * e.top_k, -1) {
    std::vector<long> next(e.count + 1);
    for (size_t pair = 0; pair < row_of.size(); pair++)
      if (here(e, ids[pair])) next[ids[pair] - e.first + 1]++;
    for (long i = 0; i < e.count; i++) {
      const long begin = next[i], end = next[i + 1] += begin;
      if (begin == end) continue;
      gate_up.push_back({e.gate_up + i, begin, end});
      down.push_back({e.down + i, begin, end});
    }
    pair_of.resize(next[e.count]);
    for (size_t pair = 0; pair < row_of.size(); pair++)
      if (here(e, ids[pair])) pair_of[row_of[pair] = next[ids[pair] - e.first]++] = long(pair);
  }
  long rows() const { return long(pair_of.size()); }

 private:
  static bool here(const Experts& e, long id) { return id >= e.first && id < e.first + e.count; }
};

void scale_row(const bf16* x, float weight, bf16* out, long width) {
  long i = 0;
  for (; i + 16 <= width; i += 16) store(out + i, load(x + i) * set1(weight));
  for (; i < width; i++) out[i] = to_bf16(to_float(x[i]) * weight);
}

// out = sum over the token's rows of y of weight * row, in the order of the token's choices.
void sum_rows(const float* y, const long* rows, const float* weights, long count, bf16* out, long width) {
  auto weight = [&](long j) { return weights ? weights[j] : 1.f; };
  long i = 0;
  for (; i + 16 <= width; i += 16) {
    vf sum = zero();
    for (long j = 0; j < count; j++)
      if (rows[j] >= 0) sum = fma(load(y + rows[j] * width + i), set1(weight(j)), sum);
    store(out + i, sum);
  }
  for (; i < width; i++) {
    float sum = 0;
    for (long j = 0; j < count; j++)
      if (rows[j] >= 0) sum = std::fma(y[rows[j] * width + i], weight(j), sum);
    out[i] = to_bf16(sum);
  }
}

// relu(x)^2, in place; `width` is padded to a multiple of 16.
void square_row(bf16* x, long width) {
  for (long i = 0; i < width; i += 16) {
    const vf positive = max(load(x + i), zero());
    store(x + i, positive * positive);
  }
}

void run_tokens(const Experts& e, const bf16* x, long ldx, const int64_t* ids, const float* weights, bf16* out,
                long ldo, long tokens) {
  const Sorted sorted(e, ids, tokens);
  // Rows whose stride is no multiple of 4 KiB, which would map them to the same few cache sets
  const long rows = sorted.rows(), hidden = e.down->n, inner = e.down->k, ldh = (hidden + 31) / 32 * 32 + 32,
             ldi = (inner + 31) / 32 * 32 + 32;
  float* y = (float*)scratch.get(rows * (hidden * sizeof(float) + (ldh + ldi) * sizeof(bf16)));
  bf16 *inputs = (bf16*)(y + rows * hidden), *between = inputs + rows * ldh;
  parallel_for(rows, 8, [&](long r) {
    const long pair = sorted.pair_of[r];
    const bf16* from = x + pair / e.top_k * ldx;
    if (e.weigh_inputs) scale_row(from, weights[pair], inputs + r * ldh, hidden);
    else memcpy(inputs + r * ldh, from, hidden * sizeof(bf16));
  });
  if (rows > 0) {
    run_products(sorted.gate_up.data(), long(sorted.gate_up.size()), inputs, ldh, between, ldi, false);
    if (e.squares) parallel_for(rows, 8, [&](long r) { square_row(between + r * ldi, (inner + 15) / 16 * 16); });
    run_products(sorted.down.data(), long(sorted.down.size()), between, ldi, y, hidden, true);
  }
  parallel_for(tokens, 4, [&](long t) {
    const float* own = e.weigh_inputs ? nullptr : weights + t * e.top_k;
    sum_rows(y, sorted.row_of.data() + t * e.top_k, own, e.top_k, out + t * ldo, hidden);
  });
}

}  // namespace

extern "C" {

// out [tokens, hidden] = for each row of x [tokens, hidden] the weighted sum of its experts: ids and weights are
// [tokens, top_k]. Experts that are not here add nothing. out may be x.
void quire_run_experts(const Experts* e, const bf16* x, long ldx, const int64_t* ids, const float* weights, bf16* out,
                       long ldo, long tokens) {
  const long most = std::max(1L, kMostPairs / e->top_k), parts = (tokens + most - 1) / most,
             each = parts ? (tokens + parts - 1) / parts : 0;
  for (long t = 0; t < tokens; t += each)
    run_tokens(*e, x + t * ldx, ldx, ids + t * e->top_k, weights + t * e->top_k, out + t * ldo, ldo,
               std::min(each, tokens - t));
}
}
