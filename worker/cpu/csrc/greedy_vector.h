// Logit bounds from the 8-bit copy of the output head, and exact logits of single blocks, on vector units. The copy is
// a quantized weight (quant.h) with separate scales.
#pragma once

#include "gemm_vector.h"
#include "greedy.h"

#if !QUIRE_AMX

namespace {

#if defined(__AVX512F__)
constexpr int kCoarseRows = 3;  // from so many rows on, products of both bytes take longer than reading the copy
#else
constexpr int kCoarseRows = INT_MAX;
#endif
constexpr long kCoarsePart = 512;  // k of a block, whole runs, that stay in L1 while all rows use them

// The rows' integers, or their high bytes only: half the products, and limits that are looser by the low bytes. The
// bytes of weights are those of the copy, or of a weight of 8 bits per value itself.
class ScreenRows {
 public:
  ScreenRows(const Gemm& g, const Quant& bytes)
      : bytes_(bytes),
        coarse_(g.m >= kCoarseRows),
        x_(rounded_rows.get(size_of(g.m, bytes)), g.m, bytes),
        starts_((int32_t*)((char*)rounded_rows.p + IntegerRows::bytes(g.m, bytes))) {
    x_.fill(g.k, [&](int r) { return g.x + r * g.ldx; });
    parallel_for(g.m, 4, [&](long r) { measure(g, r); });
  }

  // y[rows][32] = the rows times block nb.
  void multiply(int nb, float* y) const {
    if (!coarse_) return quant_block_of(bytes_)(bytes_, x_, nb, y);
#if defined(__AVX512F__)
    std::fill(y, y + x_.ld() * kCols, 0.f);
    const int passes = 2 * x_.groups();
    for (long k = 0; k < x_.width(); k += kCoarsePart) {
      const long end = std::min(k + kCoarsePart, x_.width());
      Fetch fetch{(const char*)bytes_.step(nb, int(k / 64)) + kVectorAhead, (32 + passes - 1) / passes};
      for (int i = 0; i < x_.groups(); i++)
        of_rows(x_.size(i), [&](auto n) { high_bytes<n>(i, nb, k, end, fetch, y + x_.begin(i) * kCols); });
    }
#endif
  }

  float norm[kMostGreedy],
      away[kMostGreedy];  // of each row as it is multiplied for its logits, and of what is left out of it

 private:
  static size_t size_of(long rows, const Quant& q) {
    return IntegerRows::bytes(rows, q) + rows * ((long(q.k_steps) * 64 + q.span() - 1) / q.span()) * sizeof(int32_t);
  }

  void measure(const Gemm& g, long r) {
    const long span = bytes_.span();
    float squares = 0, rest = 0;
    for (long begin = 0; begin < g.k; begin += span) {
      int sum = 0;
      for (long k = begin, end = std::min<long>(begin + span, g.k); k < end; k++) {
        const int kept = coarse_ ? 256 * x_.high_byte(r, k) : x_.value(r, k);
        const float v = g.quant ? float(x_.value(r, k)) * x_.scale(r, k) : to_float(g.x[r * g.ldx + k]),
                    off = v - float(kept) * x_.scale(r, k);
        squares += v * v, rest += off * off, sum += kept / 256;
      }
      starts_[begin / span * x_.ld() + r] = -128 * sum;
    }
    norm[r] = std::sqrt(squares), away[r] = std::sqrt(rest);
  }

#if defined(__AVX512F__)
  template <int ROWS>
  void high_bytes(int group, int nb, long k0, long k1, Fetch& fetch, float* y) const {
    const long span = bytes_.span();
    for (int c = 0; c < kCols; c += 16)
      for (long run = k0; run < k1; run += IntegerRows::kRun) {
        Floats totals[ROWS] = {};
        for (long begin = run, last = std::min(run + IntegerRows::kRun, k1); begin < last; begin += span) {
          const int32_t* starts = starts_ + begin / span * x_.ld() + x_.begin(group);
          Ints sums[ROWS];
          unrolled<ROWS>([&](auto r) __attribute__((always_inline)) { sums[r] = set1_ints(starts[r]); });
          for (long k = begin, end = std::min(begin + span, last); k < end; k += 32) {
            if (k % 64 == 0) fetch.step();
            const uint8_t* w = codes_at(bytes_, nb, int(k), c);
            const int32_t* x = x_.values(group, k);
            for (int i = 0; i < 8; i++, w += 64, x += 2 * ROWS) {
              const Ints codes = load_ints(w);
              unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
                sums[r] = add_byte_products(sums[r], codes, set1_ints(x[2 * r]));
              });
            }
          }
          const Floats scale = bytes_.sixteen(bytes_.scales, bytes_.group_at(nb, int(begin)) + c).v;
          unrolled<ROWS>([&](auto r)
                             __attribute__((always_inline)) { totals[r] = fma(to_floats(sums[r]), scale, totals[r]); });
        }
        const float* scales = x_.scales(group, run);
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          float* to = y + r * kCols + c;
          store_floats(to, fma(totals[r], set1_floats(256 * scales[r]), load_floats(to)));
        });
      }
  }
#endif

  const Quant& bytes_;
  const bool coarse_;
  const IntegerRows x_;
  int32_t* starts_;  // cancel the zero point of the codes, for the high bytes of each span: [spans][rows]
};

// Computes an upper bound of the logits of each block: limits [blocks][limits_ld(g.m)].
void find_limits(const Gemm& g, const Screen& screen, float* limits) {
  const bf16 one = to_bf16(1.f);
  bf16 ones[kCols];
  std::fill(ones, ones + kCols, one);
  // One group for all of k; group stride 0, so all blocks share these scales
  const Quant copy{(const uint8_t*)screen.data, ones, nullptr, kIntegers8, 1 << 30, 0, int(screen.k_steps)};
  const ScreenRows x(g, g.quant ? *g.quant : copy);
  over_blocks(g, Pool::get().threads(), kGreedyPiece, [&](auto&& each) {
    each([&](int nb) {
      alignas(64) float y[kMostGreedy * kCols];
      x.multiply(nb, y);
      const float* about = screen.about(nb);
      for (int r = 0; r < g.m; r++) {
        vf top = set1(kNegInf);
        for (int t = 0; t < kCols; t += 16) {
          const vf margin =
              fma(load(about + kCols + t), set1(x.away[r]), load(about + 2 * kCols + t) * set1(x.norm[r]));
          top = max(top, fma(load(y + r * kCols + t), load(about + t), margin));
        }
        limits[nb * limits_ld(g.m) + r] = reduce_max(top);
      }
    });
  });
}

// Writes what `about` holds of the columns of a block of a weight of 8 bits per value that is screened without a copy.
// Returns false if a scale is not finite.
inline bool measure_block(const Quant& q, const Screen& screen, int nb) {
  bool finite = true;
  for (int c = 0; c < kCols; c += kLanes) {
    Floats squares = {};
    for (long k = 0; k < q.k_steps * 64L; k += 32) {
      float scales[kLanes];
      for (int i = 0; i < kLanes; i++) {
        const long at = q.group_at(nb, int(k)) + c + i;
        scales[i] = q.half ? to_float(((const f16*)q.scales)[at]) : to_float(((const bf16*)q.scales)[at]);
      }
      const uint8_t* codes = codes_at(q, nb, int(k), c);
      for (int i = 0; i < 8; i++) {
        const Ints line = load_ints(codes + i * 64);
        unrolled<4>([&](auto byte) __attribute__((always_inline)) {
          // As a signed byte s, a code is 128 - |s| away from its zero point, 128
          const Floats s = to_floats(signed_right<24>(left<24 - 8 * byte>(line)));
          const Floats w = (set1_floats(128) - Floats(Ints(s) & set1_ints(0x7fffffff))) * load_floats(scales);
          squares = fma(w, w, squares);
        });
      }
    }
    float* about = screen.about(nb) + c;
    const Floats norm = root(squares);
    store_floats(about, set1_floats(1)), store_floats(about + kCols, norm),
        store_floats(about + 2 * kCols, norm * set1_floats(slack_of(q.k_steps * 64L)));
    for (int i = 0; i < kLanes; i++) finite &= std::isfinite(squares[i]);
  }
  return finite;
}

// Computes exact logits of single blocks, by the same code as for all logits: of a few rows one after the other, else
// of all. The rows are `Groups` or IntegerRows, as all logits take them.
class Logits {
 public:
  explicit Logits(const Gemm& g)
      : g_(g), each_(g.quant ? IntegerRows::bytes(1, *g.quant) : Groups::floats(g.k, 1) * sizeof(float)) {
    const long all = g.quant ? IntegerRows::bytes(g.m, *g.quant) : Groups::floats(g.k, g.m) * sizeof(float);
    each_ = (each_ + 63) / 64 * 64;
    memory_ = (char*)rounded_rows.get(g.m * each_ + all);
    fill(memory_ + g.m * each_, 0, g.m);
    for (int r = 0; r < (g.m > kAlone ? g.m : 0); r++) fill(memory_ + r * each_, r, 1);
  }
  // Returns the rows that block computes to compute `rows`.
  uint32_t computed(uint32_t rows) const {
    return g_.m > kAlone && __builtin_popcount(rows) <= kAlone ? rows : uint32_t((1ull << g_.m) - 1);
  }
  // Calls f in a thread that computes blocks; no setup is needed.
  template <typename F>
  void run(F&& f) const { f(); }
  void block(const Gemm& to, int nb, uint32_t rows) const {
    if (rows == computed(~0u)) return multiply(to, memory_ + g_.m * each_, 0, g_.m, nb);
    for (; rows; rows &= rows - 1) {
      const int r = __builtin_ctz(rows);
      multiply(to, memory_ + r * each_, r, 1, nb);
    }
  }

 private:
  static constexpr int kAlone = 4;  // maximum rows one after the other

  void fill(char* memory, int row0, int rows) const {
    auto row = [&](int r) { return g_.x + (row0 + r) * g_.ldx; };
    if (g_.quant) IntegerRows(memory, rows, *g_.quant).fill(g_.k, row);
    else Groups((float*)memory, g_.k, rows).fill(g_.k, row);
  }
  void multiply(const Gemm& to, char* memory, int row0, int rows, int nb) const {
    alignas(64) float sums[kMostGreedy * kCols];
    if (!g_.quant) return vector_block(to, Groups((float*)memory, g_.k, rows), row0, rows, nb, sums);
    quant_block_of(*g_.quant)(*g_.quant, IntegerRows(memory, rows, *g_.quant), nb, sums);
    for (int r = 0; r < rows; r++)
      finish_row(to, row0 + r, nb * kCols, load(sums + r * kCols), load(sums + r * kCols + 16));
  }

  const Gemm& g_;
  long each_;
  char* memory_;  // the rows one by one, then all
};

}  // namespace

#endif
