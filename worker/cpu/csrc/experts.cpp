// The experts of a mixture-of-experts layer: each token is multiplied by the experts chosen for it, and the results are
// summed by weight. Rows are sorted by expert, so that the weights of each expert that has rows are read once per call,
// those of other experts not at all.
#include <algorithm>
#include <vector>

#include "gated_rows.h"
#include "kernels.h"
#include "lora.h"
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

// The adapters of a call. Rows are tokens, `LoraRows::layers` is numbered by expert.
struct Adapters {
  const LoraRows *gate_up, *down;
  long count;
};

// Adapters with the sorted rows of the tokens from `first` on.
class AdaptedRows {
 public:
  AdaptedRows(const Adapters& a, const Experts& e, const Sorted& sorted, long first, long tokens)
      : rows_(a.count), scales_(a.count), gate_up_(a.gate_up, a.gate_up + a.count), down_(a.down, a.down + a.count) {
    std::vector<float> scale(tokens);  // of a token, where `has`
    std::vector<char> has(tokens);
    for (long g = 0; g < a.count; g++) {
      std::fill(has.begin(), has.end(), 0);
      const LoraRows& given = a.gate_up[g];
      const int64_t *begin = std::lower_bound(given.rows, given.rows + given.count, first),
                    *end = std::lower_bound(begin, given.rows + given.count, first + tokens);
      for (const int64_t* t = begin; t < end; t++)
        has[*t - first] = 1, scale[*t - first] = given.scales ? given.scales[t - given.rows] : 1.f;
      for (long r = 0; begin < end && r < sorted.rows(); r++) {
        const long t = sorted.pair_of[r] / e.top_k;
        if (has[t]) rows_[g].push_back(r), scales_[g].push_back(scale[t]);
      }
      for (LoraRows* of : {&gate_up_[g], &down_[g]})
        of->rows = rows_[g].data(), of->scales = scales_[g].data(), of->count = long(rows_[g].size());
    }
  }

  bool any() const {
    return std::any_of(rows_.begin(), rows_.end(), [](const auto& rows) { return !rows.empty(); });
  }

  // Adds to the products of the experts, which begin at `experts`.
  template <typename O>
  void add(bool is_down, const std::vector<LinearRows>& products, const Linear* experts, const bf16* x, long ldx,
           O* out, long ldo) const {
    const std::vector<LoraRows>& groups = is_down ? down_ : gate_up_;
    for (const LinearRows& p : products) {
      const LoraStep step{groups.data(), long(groups.size()), p.linear - experts, p.begin, p.end};
      if (step.applies()) add_lora(step, x + p.begin * ldx, ldx, out + p.begin * ldo, ldo);
    }
  }

 private:
  std::vector<std::vector<int64_t>> rows_;
  std::vector<std::vector<float>> scales_;
  std::vector<LoraRows> gate_up_, down_;
};

thread_local Scratch halves_scratch;

// The gate and up of the experts with what adapters add, and the activation.
void run_gate_up(const Experts& e, const Sorted& sorted, const AdaptedRows& adapted, const bf16* x, long ldx, bf16* out,
                 long ldo) {
  std::vector<Linear> both(sorted.gate_up.size());
  std::vector<LinearRows> products;
  for (size_t i = 0; i < both.size(); i++) {
    both[i] = ungated(*sorted.gate_up[i].linear);
    products.push_back({&both[i], sorted.gate_up[i].begin, sorted.gate_up[i].end});
  }
  const long rows = sorted.rows(), ldh = both[0].n + 32;
  float* halves = (float*)halves_scratch.get(rows * ldh * sizeof(float));
  run_products(products.data(), long(products.size()), x, ldx, halves, ldh, true);
  adapted.add(false, sorted.gate_up, e.gate_up, x, ldx, halves, ldh);
  activate_rows(int(e.gate_up->gated), halves, ldh, out, ldo, rows, e.gate_up->n / 2);
}

void run_tokens(const Experts& e, const Adapters& adapters, long first, const bf16* x, long ldx, const int64_t* ids,
                const float* weights, bf16* out, long ldo, long tokens) {
  const Sorted sorted(e, ids, tokens);
  const AdaptedRows adapted(adapters, e, sorted, first, tokens);
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
    if (adapted.any()) run_gate_up(e, sorted, adapted, inputs, ldh, between, ldi);
    else run_products(sorted.gate_up.data(), long(sorted.gate_up.size()), inputs, ldh, between, ldi, false);
    if (e.squares) parallel_for(rows, 8, [&](long r) { square_row(between + r * ldi, (inner + 15) / 16 * 16); });
    run_products(sorted.down.data(), long(sorted.down.size()), between, ldi, y, hidden, true);
    adapted.add(true, sorted.down, e.down, between, ldi, y, hidden);
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
  quire_run_adapted_experts(e, x, ldx, ids, weights, out, ldo, tokens, nullptr, nullptr, 0);
}

// The same with `count` adapters, whose rows are tokens; `LoraRows::layers` is numbered by expert.
void quire_run_adapted_experts(const Experts* e, const bf16* x, long ldx, const int64_t* ids, const float* weights,
                               bf16* out, long ldo, long tokens, const LoraRows* gate_up, const LoraRows* down,
                               long count) {
  const long most = std::max(1L, kMostPairs / e->top_k), parts = (tokens + most - 1) / most,
             each = parts ? (tokens + parts - 1) / parts : 0;
  for (long t = 0; t < tokens; t += each)
    run_tokens(*e, {gate_up, down, count}, t, x + t * ldx, ldx, ids + t * e->top_k, weights + t * e->top_k,
               out + t * ldo, ldo, std::min(each, tokens - t));
}
}
