// Adds scale * B A x to the products of rows that have LoRA adapters: first the product of each row with A (shrink), of
// all adapters, then that with B (expand). Matrices have the type of the activations, sums are float32.
#include "lora.h"

#include <algorithm>
#include <vector>

#include "lora_tiles.h"
#include "parallel.h"

namespace {

constexpr int kRows = 4, kRanks = 4;    // of a block of sums that stay in registers
constexpr long kRowsAtOnce = 16;        // rows that stay in L1 while the rows of A pass
constexpr long kMinParallel = 1 << 16;  // multiplications; for fewer, waking other threads costs more than it saves

long rounded_up(long n, long to) { return (n + to - 1) / to * to; }

// Adds to `sum` the products of 32 consecutive entries.
template <typename T>
vf dot(const T* x, const T* y, vf sum) {
  return fma(load(x + 16), load(y + 16), fma(load(x), load(y), sum));
}
#if defined(__AVX512BF16__)
template <>
vf dot(const bf16* x, const bf16* y, vf sum) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(y))};
}
#endif

// The rows of an adapter, and its matrices of a layer.
template <typename T>
struct Span {
  const LoraMatrices* matrices;
  const int64_t* rows;
  const float* scales;
  long count, begin;
  float* inner;  // [count, ld_inner]: the rows' products with A
  const T* x;    // row 0
  long ldx;
  const T* padded;  // [count, k], if k is no multiple of 32; else null

  long ld_inner() const { return rounded_up(matrices->rank, kRanks); }
  long k() const { return rounded_up(matrices->k, 32); }
  long blocks() const { return ld_inner() / kRanks; }
  long work() const { return count * ld_inner() * k(); }
  const T* row(long i) const { return padded ? padded + i * k() : x + (rows[i] - begin) * ldx; }
};

// Multiplies R rows from `row` on by kRanks rows of A.
template <int R, typename T>
void shrink_block(const Span<T>& s, long row, long block) {
  const long k = s.k();
  const T *a = (const T*)s.matrices->a + block * kRanks * k, *x[R];
  for (int r = 0; r < R; r++) x[r] = s.row(row + r);
  vf sums[R][kRanks];
  for (auto& of_row : sums)
    for (vf& sum : of_row) sum = zero();
  for (long i = 0; i < k; i += 32)
    for (int r = 0; r < R; r++)
      for (int j = 0; j < kRanks; j++) sums[r][j] = dot(x[r] + i, a + j * k + i, sums[r][j]);
  for (int r = 0; r < R; r++) {
    const float scale = s.scales ? s.scales[row + r] : 1.f;
    for (int j = 0; j < kRanks; j++)
      s.inner[(row + r) * s.ld_inner() + block * kRanks + j] = reduce_add(sums[r][j]) * scale;
  }
}

// Piece i: kRowsAtOnce rows times one block of A.
template <typename T>
void shrink(const Span<T>& s, long i) {
  const long block = i % s.blocks(), end = std::min(s.count, (i / s.blocks() + 1) * kRowsAtOnce);
  long row = i / s.blocks() * kRowsAtOnce;
  for (; row + kRows <= end; row += kRows) shrink_block<kRows>(s, row, block);
  for (; row < end; row++) shrink_block<1>(s, row, block);
}

template <typename O>
void add_to(O* out, vf value, long width) {
  if (width >= 16) return store(out, load(out) + value);
  alignas(64) float values[16];
  store(values, value);
  for (long i = 0; i < width; i++) store_scalar(out + i, to_float(out[i]) + values[i]);
}

// Adds to the 32 columns of `block` of R rows.
template <int R, typename T, typename O>
void expand_block(const Span<T>& s, const LoraPart& part, long row, long block, O* out, long ldo) {
  const T* b = (const T*)part.b + block * part.rank * 32;
  const float* inner = s.inner + row * s.ld_inner() + part.first;
  vf sums[R][2];
  for (auto& of_row : sums) of_row[0] = of_row[1] = zero();
  for (long i = 0; i < part.rank; i++) {
    const vf left = load(b + i * 32), right = load(b + i * 32 + 16);
    for (int r = 0; r < R; r++) {
      const vf x = set1(inner[r * s.ld_inner() + i]);
      sums[r][0] = fma(x, left, sums[r][0]), sums[r][1] = fma(x, right, sums[r][1]);
    }
  }
  const long width = part.columns - block * 32;
  for (int r = 0; r < R; r++) {
    O* to = out + (s.rows[row + r] - s.begin) * ldo + part.at + 2 * block * part.step;
    add_to(to, sums[r][0], width);
    if (width > 16) add_to(to + part.step, sums[r][1], width - 16);
  }
}

// Adds to the blocks of 32 columns that begin in [from, to) of the output.
template <typename T, typename O>
void expand(const Span<T>& s, O* out, long ldo, long from, long to) {
  for (const LoraPart *part = s.matrices->parts, *end = part + s.matrices->num_parts; part < end; part++) {
    const long step = 2 * part->step, blocks = (part->columns + 31) / 32;
    const auto first_from = [&](long column) {
      return column <= part->at ? 0 : std::min(blocks, (column - part->at + step - 1) / step);
    };
    const long begin = first_from(from), last = first_from(to);
    if (begin == last) continue;
    long row = 0;
    for (; row + kRows <= s.count; row += kRows)
      for (long block = begin; block < last; block++) expand_block<kRows>(s, *part, row, block, out, ldo);
    for (; row < s.count; row++)
      for (long block = begin; block < last; block++) expand_block<1>(s, *part, row, block, out, ldo);
  }
}

thread_local Scratch scratch;

// The spans of a step's adapters that have matrices for the layer, with memory for `inner` and padded rows.
template <typename T>
std::vector<Span<T>> spans(const LoraStep& step, const T* x, long ldx) {
  std::vector<Span<T>> found;
  size_t floats = 0, padded = 0;
  for (const LoraRows *g = step.groups, *last = g + step.count; g < last; g++) {
    const LoraMatrices& m = g->layers[step.layer];
    const int64_t *begin = std::lower_bound(g->rows, g->rows + g->count, step.begin),
                  *end = std::lower_bound(begin, g->rows + g->count, step.end);
    if (!step.takes(m) || begin == end) continue;
    found.push_back({&m, begin, g->scales ? g->scales + (begin - g->rows) : nullptr, end - begin, step.begin, nullptr,
                     x, ldx, nullptr});
    floats += found.back().count * found.back().ld_inner();
    if (m.k % 32) padded += found.back().count * found.back().k();
  }
  float* inner = (float*)scratch.get(rounded_up(floats * sizeof(float), 64) + padded * sizeof(T));
  T* copy = (T*)((char*)inner + rounded_up(floats * sizeof(float), 64));
  for (Span<T>& s : found) {
    s.inner = inner, inner += s.count * s.ld_inner();
    if (s.matrices->k % 32 == 0) continue;
    for (long i = 0; i < s.count; i++) {
      memcpy(copy + i * s.k(), s.row(i), s.matrices->k * sizeof(T));
      memset(copy + i * s.k() + s.matrices->k, 0, (s.k() - s.matrices->k) * sizeof(T));
    }
    s.padded = copy, copy += s.count * s.k();
  }
  return found;
}

}  // namespace

bool LoraStep::applies() const {
  for (const LoraRows *g = groups, *last = g + count; g < last; g++) {
    const int64_t* first = std::lower_bound(g->rows, g->rows + g->count, begin);
    if (takes(g->layers[layer]) && first < g->rows + g->count && *first < end) return true;
  }
  return false;
}

template <typename T, typename O>
void add_lora(const LoraStep& step, const T* x, long ldx, O* out, long ldo) {
  const std::vector<Span<T>> all = spans(step, x, ldx);
  if (all.empty()) return;
  std::vector<long> first{0};  // piece of each span
  long work = 0, width = 0;
  for (const Span<T>& s : all) {
    first.push_back(first.back() + (s.count + kRowsAtOnce - 1) / kRowsAtOnce * s.blocks());
    work += s.work();
    for (long i = 0; i < s.matrices->num_parts; i++) {
      const LoraPart& part = s.matrices->parts[i];
      width = std::max(width, part.at + (part.columns + 15) / 16 * part.step);
    }
  }
  const bool alone = work < kMinParallel;
  parallel_for(first.back(), alone ? first.back() : 1, [&](long i) {
    const long span = std::upper_bound(first.begin(), first.end(), i) - first.begin() - 1;
    shrink(all[span], i - first[span]);
  });
  // A piece has all rows of some columns: two adapters of a row never add to it at once.
  const long each = alone ? width : std::max(128L, rounded_up(width / (4L * Pool::get().threads()), 32));
  parallel_for((width + each - 1) / each, 1, [&](long i) {
    for (const Span<T>& s : all) expand(s, out, ldo, i * each, (i + 1) * each);
  });
}

template void add_lora(const LoraStep&, const bf16*, long, bf16*, long);
template void add_lora(const LoraStep&, const bf16*, long, float*, long);

extern "C" {

// Adds to out [tokens, ..] for x [tokens, k] and matrices of `dtype` (0 float32, 1 bfloat16, 2 float16); out has that
// type, too, or is float32. fixed: the sums of a row have one order, whatever the other rows.
void quire_add_lora(const LoraRows* groups, long num_groups, const void* x, long ldx, void* out, long ldo, long tokens,
                    int dtype, int out_dtype, bool fixed) {
  LoraStep step{groups, num_groups, 0, 0, tokens};
  if (dtype == 1 && !fixed) {
    step.untiled = out_dtype == 1 ? add_lora_tiles(step, (const bf16*)x, ldx, (bf16*)out, ldo)
                                  : add_lora_tiles(step, (const bf16*)x, ldx, (float*)out, ldo);
  }
  if (dtype == 0) return add_lora(step, (const float*)x, ldx, (float*)out, ldo);
  if (dtype == 1 && out_dtype == 1) return add_lora(step, (const bf16*)x, ldx, (bf16*)out, ldo);
  if (dtype == 1) return add_lora(step, (const bf16*)x, ldx, (float*)out, ldo);
  if (out_dtype == 2) return add_lora(step, (const f16*)x, ldx, (f16*)out, ldo);
  add_lora(step, (const f16*)x, ldx, (float*)out, ldo);
}
}
