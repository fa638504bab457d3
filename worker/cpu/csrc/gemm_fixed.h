// Products of many rows in fixed point on vector units (fixed_tiles.h). Used for compact weights, and for quantized
// weights, whose groups are too short for their own integer products (quant_vector.h) to be as fast.
#pragma once

#include "fixed_tiles.h"
#include "gemm_vector.h"

namespace {

// Minimum rows; 5 rows, or 8 with AVX2, take as long as in floats
constexpr int kFixedRows = !kFastWords ? INT_MAX : kLanes == 16 ? 6 : 9;
// Minimum rows for quantized weights, which cost more to prepare
constexpr int kFixedQuantRows = kFastWords ? 96 : INT_MAX;
constexpr int kFixedFloatRows = kFastWords ? 16 : INT_MAX;  // the same for 8-bit floats
// Minimum rows for logits: the largest must not depend on whether all are computed
constexpr int kFixedLogitRows = kFastWords ? kMostGreedy + 1 : INT_MAX;
constexpr long kFixedPiece = 1 << 20;   // bytes of the rows of one chunk
constexpr long kFixedAhead = 16 << 10;  // prefetch distance in bytes

inline const uint8_t* units_of(const Compact& w, int nb, long run) {
  return w.units + (nb * runs_of(w.k_steps) + run) * kCols;
}

// Computes the columns' units in each run of a block, packed [k_steps][2 tiles][16][16 columns][2]; only the first k
// entries count. units [runs][32] are the units' float exponents minus `shift`, to match the compact weight.
inline void find_units(const bf16* packed, long k, int shift, uint8_t* units) {
  for (long begin = 0; begin < k; begin += kFixedRun, units += kCols)
    for (int part = 0; part < kCols / kLanes; part++) {
      const long pairs = (std::min(long(kFixedRun), k - begin) + 1) / 2;
      Floats even = {}, odd = {};
      for (long p = 0; p < pairs; p++) {
        const Ints both = load_ints(packed + begin / kStep * kStepElems + pair_place(part, p));
        even = fma(evens(both), evens(both), even), odd = fma(odds(both), odds(both), odd);
      }
      int bits[kLanes];
      store_ints(bits, Ints(fixed_unit(even + odd)));
      for (int c = 0; c < kLanes; c++) {
        const int exponent = bits[c] >> 23;
        units[part * kLanes + c] =
            uint8_t(exponent == 0 || exponent == 255 ? exponent : std::clamp(exponent - shift, 0, 254));
      }
    }
}

// Converts a block of a weight to integers, one run at a time, with the run's unit for each column.
class FixedCompact {
 public:
  FixedCompact(const Gemm& g, int nb, bool stream)
      : w_(*g.compact), nb_(nb), stream_(stream), next_(w_.exceptions_from(nb, 0)) {}
  static constexpr int kLines = Compact::kStepWords / 32;
  const void* stored(int s) const { return w_.step(nb_, s); }
  void fix(int s, int count, int16_t* fixed, float* units) {
    const uint8_t* exponents = units_of(w_, nb_, s / kFixedSteps);
    float magic[kCols];
    for (int c = 0; c < kCols; c += kLanes) {
      const Floats unit = Floats(left<23>(widen_bytes(exponents + c)));
      store_floats(units + c, unit);
      store_floats(magic + c, magic_of(unit));
    }
    for (int i = 0; i < count; i++) fix_step(s + i, magic, fixed + i * kStepElems);
  }

 private:
  // Like expand_step, but writes integers.
  void fix_step(int s, const float* magic, int16_t* fixed) {
    const uint16_t* src = w_.step(nb_, s);
    int16_t* dst = fixed;
    for (int t = 0; t < 2; t++) {
      for (int i = 0; i < 4; i++, src += 96, dst += 128) {
        if (stream_) read_ahead(src), read_ahead(src + 32), read_ahead(src + 64);
        unrolled<kParts>([&](auto part) __attribute__((always_inline)) {
          Ints pairs[4];
          expand_part(src + part * 2 * kLanes, pairs);
          unrolled<4>([&](auto v) __attribute__((always_inline)) {
            store_ints(dst + v * 32 + part * 2 * kLanes,
                       in_units(evens(pairs[v]), odds(pairs[v]), load_floats(magic + t * 16 + part * kLanes)));
          });
        });
      }
    }
    for (const uint64_t step = uint64_t(nb_) * w_.k_steps + s; *next_ >> 32 == step; next_++) {
      const int place = *next_ >> 16 & 1023;
      const float shifted = to_float(bf16{uint16_t(*next_)}) + magic[place / 512 * 16 + place % 32 / 2];
      memcpy(fixed + place, &shifted, 2);
    }
  }

  const Compact& w_;
  int nb_;
  bool stream_;
  const uint64_t* next_;
};

template <int KIND>
class FixedQuant {
 public:
  FixedQuant(const Gemm& g, int nb, bool) : q_(*g.quant), nb_(nb) {}
  static constexpr int kLines = 2 * quant_bits(KIND);
  const void* stored(int s) const { return q_.step(nb_, s / 2); }
  void fix(int s, int count, int16_t* fixed, float* units) const {
    for (int k = 0; k < count * kStep; k += 32) widen(s * kStep + k, fixed + k / kStep * kStepElems);
    // The scales of each 16 k
    GroupNumbers numbers[2][kFixedRun / 16];
    const int each = std::max(1, std::min(q_.group, kFixedRun) / 16);
    for (int t = 0; t < 2; t++)
      for (int i = 0; i < count * 2; i++)
        numbers[t][i] = i % each ? numbers[t][i - 1] : numbers_of(q_, nb_, s * kStep + i * 16, t);
    for (int part = 0; part < kCols / kLanes; part++) {
      Floats squares[4] = {};
      over_pairs(numbers, count, part, fixed,
                 [&](int i, int16_t*, Floats even, Floats odd) __attribute__((always_inline)) {
                   squares[i] = fma(even, even, squares[i]), squares[i + 2] = fma(odd, odd, squares[i + 2]);
                 });
      const Floats unit = fixed_unit((squares[0] + squares[1]) + (squares[2] + squares[3])), magic = magic_of(unit);
      store_floats(units + part * kLanes, unit);
      over_pairs(numbers, count, part, fixed,
                 [&](int, int16_t* at, Floats even, Floats odd)
                     __attribute__((always_inline)) { store_ints(at, in_units(even, odd, magic)); });
    }
  }

 private:
  // Widens 32 k to 16-bit integers.
  void widen(int k, int16_t* to) const {
    const Ints zero_point = set1_words(quant_zero_point(KIND));
    static constexpr int8_t kFirst[16] = {0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1},
                            kSecond[16] = {2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1};
    const Ints first = repeat(kFirst), second = repeat(kSecond);
    for (int column = 0; column < kCols; column += kLanes) {
      const uint8_t* at = codes_at(q_, nb_, k, column);
      auto put = [&](int row, Ints bytes) {  // four k of kLanes columns
        int16_t* pairs = to + row * 64 + tile_place(column);
        store_ints(pairs, sub_words(shuffle_bytes(bytes, first), zero_point));
        store_ints(pairs + 32, sub_words(shuffle_bytes(bytes, second), zero_point));
      };
      codes_of<KIND>(at, 0, put);
      codes_of<KIND>(at, 1, [&](int i, Ints bytes) { put(4 + i, bytes); });
    }
  }

  // Calls f(p % 2, address of the pairs, weights of even k, weights of odd k) for all pairs of k in register `part` of
  // the columns.
  template <typename F>
  void over_pairs(const GroupNumbers (*numbers)[kFixedRun / 16], int count, int part, int16_t* fixed, F&& f) const {
    for (int i = 0; i < count * 2; i++) {
      const GroupNumbers& own = numbers[part / kParts][i];
      const Floats scale = ::part(own.scale, part % kParts), offset = ::part(own.offset, part % kParts);
      for (int p = 0; p < 8; p++) {
        int16_t* at = fixed + pair_place(part, i * 8 + p);
        const Ints pairs = load_ints(at);
        f(p % 2, at, fma(to_floats(signed_right<16>(left<16>(pairs))), scale, offset),
          fma(to_floats(signed_right<16>(pairs)), scale, offset));
      }
    }
  }

  const Quant& q_;
  int nb_;
};

class FixedE4m3 {
 public:
  FixedE4m3(const Gemm& g, int nb, bool) : q_(*g.quant), nb_(nb) {}
  static constexpr int kLines = 16;
  const void* stored(int s) const { return q_.step(nb_, s / 2); }
  void fix(int s, int count, int16_t* fixed, float* units) const {
    for (int part = 0; part < kCols / kLanes; part++) {
      Floats squares[2] = {};
      over_pairs(s, count, part, [&](int, Floats even, Floats odd) __attribute__((always_inline)) {
        squares[0] = fma(even, even, squares[0]), squares[1] = fma(odd, odd, squares[1]);
      });
      const Floats unit = fixed_unit(squares[0] + squares[1]), magic = magic_of(unit);
      store_floats(units + part * kLanes, unit);
      over_pairs(s, count, part, [&](int p, Floats even, Floats odd) __attribute__((always_inline)) {
        store_ints(fixed + pair_place(part, p), in_units(even, odd, magic));
      });
    }
  }

 private:
  // Calls f(p, weights of even k, weights of odd k) for all pairs p of k in register `part` of the columns.
  template <typename F>
  void over_pairs(int s, int count, int part, F&& f) const {
    for (int i = 0; i < count; i++) {
      const int k = (s + i) * kStep;
      const Floats scale = load_floats((const float*)q_.scales + q_.group_at(nb_, k) + part * kLanes);
      const uint8_t* lines = codes_at(q_, nb_, k, part * kLanes);
      for (int line = 0; line < 8; line++) {
        const Ints codes = load_ints(lines + line * 64);
        f(i * 16 + line * 2, widen_e4m3<0>(codes) * scale, widen_e4m3<1>(codes) * scale),
            f(i * 16 + line * 2 + 1, widen_e4m3<2>(codes) * scale, widen_e4m3<3>(codes) * scale);
      }
    }
  }

  const Quant& q_;
  int nb_;
};

// Multiplies the chunk, which x holds, by block nb. y: scratch, [rows][32].
template <typename W>
void fixed_block(const Chunk& c, const FixedRows& x, int nb, float* y) {
  const Gemm& g = *c.g;
  const int passes = kPasses * x.groups();
  // If so, prefetch while expanding: the products of few rows are too short to spread the prefetches over
  const bool stream = x.groups() == 1;
  W weights(g, nb, stream);
  alignas(64) int16_t fixed[kFixedSteps * kStepElems];
  float units[kCols];
  std::fill(y, y + c.rows * kCols, 0.f);
  for (int s = 0; s < g.k_steps(); s += kFixedSteps) {
    const int run = s / kFixedSteps, count = std::min(kFixedSteps, g.k_steps() - s);
    Fetch fetch{(const char*)weights.stored(s) + kFixedAhead, stream ? 0 : (W::kLines + passes - 1) / passes};
    weights.fix(s, count, fixed, units);
    for (int i = 0; i < x.groups(); i++)
      fixed_group(x, i, run, fixed, count, units, fetch, y + x.begin(i) * kCols, kCols);
  }
  for (int r = 0; r < c.rows; r++) finish_row(g, c.row0 + r, nb * kCols, load(y + r * kCols), load(y + r * kCols + 16));
}

// `memory` holds the sums, then the chunk as integers.
inline void run_fixed(const std::vector<Gemm>& products, int threads) {
  const Gemm& first = products[0];
  const long k = long(first.k_steps()) * kStep;
  auto block = fixed_block<FixedCompact>;
  if (first.quant)
    of_kind(first.quant->kind, [&](auto kind) {
      block = fixed_block<
          std::conditional_t<kind == kFloats8, FixedE4m3, FixedQuant<kind == kFloats8 ? int(kIntegers8) : int(kind)>>>;
    });
  auto integers = [&](float* memory, const Chunk& c) { return FixedRows(memory + c.rows * kCols, c.rows, k); };
  over_chunks(
      products, threads, kFixedPiece / (k * sizeof(int16_t)),
      [&](int rows) { return rows * kCols * sizeof(float) + FixedRows::bytes(rows, k); },
      [&](float* memory, const Chunk& c) {
        integers(memory, c).fill(c.g->k, [&](int r) { return c.g->x + (c.row0 + r) * c.g->ldx; });
      },
      [&](float* memory, const Chunk& c, int nb) { block(c, integers(memory, c), nb, memory); });
}

}  // namespace
