// Products of many rows by AVX2 as fixed-point numbers (fixed_tiles.h). For compact weights, and for those of 8 and 4 bits, whose groups are too short for integers of their own
// (gemm_avx2.h) to be as fast.
#pragma once

#include "fixed_tiles.h"
#include "gemm_avx2.h"

#if !defined(__AVX512F__)

namespace {

constexpr int kFixedRows = 9;                     // from which on it pays: of 8 it takes as long as floats
constexpr int kFixedQuantRows = 96;               // of weights of 8 and 4 bits, which take more work to prepare
constexpr int kFixedLogitRows = kMostGreedy + 1;  // the largest logit must be the same whether it alone is wanted or all
constexpr long kFixedPiece = 1 << 20;   // bytes of the rows of a chunk
constexpr long kFixedAhead = 16 << 10;  // bytes that the memory is ahead

inline const uint8_t* units_of(const Compact& w, int nb, long run) { return w.units + (nb * runs_of(w.k_steps) + run) * kCols; }

// Finds the columns' units in each run of a block, packed [k_steps][2 tiles][16][16 columns][2], of which k counts: units [runs][32] are their exponents as floats of the
// compact weight have them, less by `shift`.
inline void find_units(const bf16* packed, long k, int shift, uint8_t* units) {
  for (long begin = 0; begin < k; begin += kFixedRun, units += kCols)
    for (int part = 0; part < 4; part++) {  // eight columns
      const long pairs = (std::min(long(kFixedRun), k - begin) + 1) / 2;
      __m256 even = _mm256_setzero_ps(), odd = even;
      for (long p = 0; p < pairs; p++) {
        const __m256i both = load_pairs(packed + begin / kStep * kStepElems + pair_place(part, p));
        even = _mm256_fmadd_ps(evens(both), evens(both), even), odd = _mm256_fmadd_ps(odds(both), odds(both), odd);
      }
      alignas(32) int bits[8];
      _mm256_store_si256((__m256i*)bits, _mm256_castps_si256(fixed_unit(even + odd)));
      for (int c = 0; c < 8; c++) {
        const int exponent = bits[c] >> 23;
        units[part * 8 + c] = uint8_t(exponent == 0 || exponent == 255 ? exponent : std::clamp(exponent - shift, 0, 254));
      }
    }
}

// A block of a weight, run by run as integers: those of a run come with their columns' units.
class FixedCompact {
 public:
  FixedCompact(const Gemm& g, int nb) : w_(*g.compact), nb_(nb), next_(w_.exceptions_from(nb, 0)) {}
  static constexpr int kLines = Compact::kStepWords / 32;
  const void* stored(int s) const { return w_.step(nb_, s); }
  void fix(int s, int count, int16_t* fixed, float* units) {
    const uint8_t* exponents = units_of(w_, nb_, s / kFixedSteps);
    float magic[kCols];
    for (int c = 0; c < kCols; c += 8) {
      const __m256 unit = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(exponents + c))), 23));
      _mm256_storeu_ps(units + c, unit);
      _mm256_storeu_ps(magic + c, magic_of(unit));
    }
    for (int i = 0; i < count; i++) fix_step(s + i, magic, fixed + i * kStepElems);
  }

 private:
  // As expand_step, to integers.
  void fix_step(int s, const float* magic, int16_t* fixed) {
    const uint16_t* src = w_.step(nb_, s);
    int16_t* dst = fixed;
    for (int t = 0; t < 2; t++) {
      const __m256 magics[2] = {_mm256_loadu_ps(magic + t * 16), _mm256_loadu_ps(magic + t * 16 + 8)};
      for (int i = 0; i < 4; i++, src += 96, dst += 128)
        unrolled<2>([&](auto half) __attribute__((always_inline)) {
          __m256i pairs[4];
          expand_sixteen(src + half * 16, pairs);
          unrolled<4>([&](auto v) __attribute__((always_inline)) {
            _mm256_store_si256((__m256i*)(dst + v * 32 + half * 16), in_units(evens(pairs[v]), odds(pairs[v]), magics[half]));
          });
        });
    }
    for (const uint64_t step = uint64_t(nb_) * w_.k_steps + s; *next_ >> 32 == step; next_++) {
      const int place = *next_ >> 16 & 1023;
      const float shifted = to_float(bf16{uint16_t(*next_)}) + magic[place / 512 * 16 + place % 32 / 2];
      memcpy(fixed + place, &shifted, 2);
    }
  }

  const Compact& w_;
  int nb_;
  const uint64_t* next_;
};

template <int BITS>
class FixedQuant {
 public:
  FixedQuant(const Gemm& g, int nb) : q_(*g.quant), nb_(nb) {}
  static constexpr int kLines = 2 * BITS;
  const void* stored(int s) const { return q_.step(nb_, s / 2); }
  void fix(int s, int count, int16_t* fixed, float* units) const {
    for (int i = 0; i < count; i += 2) widen(s + i, fixed + i * kStepElems);
    for (int part = 0; part < 4; part++) {  // eight columns
      __m256 squares[4] = {};
      over_pairs(s, count, part, fixed, [&](int i, int16_t*, __m256 even, __m256 odd) __attribute__((always_inline)) {
        squares[i] = _mm256_fmadd_ps(even, even, squares[i]), squares[i + 2] = _mm256_fmadd_ps(odd, odd, squares[i + 2]);
      });
      const __m256 unit = fixed_unit((squares[0] + squares[1]) + (squares[2] + squares[3])), magic = magic_of(unit);
      _mm256_storeu_ps(units + part * 8, unit);
      over_pairs(s, count, part, fixed, [&](int, int16_t* at, __m256 even, __m256 odd) __attribute__((always_inline)) {
        _mm256_store_si256((__m256i*)at, in_units(even, odd, magic));
      });
    }
  }

 private:
  // Two k-steps as integers of 16 bits.
  void widen(int s, int16_t* to) const {
    const __m256i zero_point = _mm256_set1_epi16(short(q_.zero_point())), low = _mm256_set1_epi8(15);
    const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
    const __m256i second = _mm256_add_epi8(first, _mm256_set1_epi16(2));
    const uint8_t* line = q_.step(nb_, s / 2);
    auto put = [&](int t, int row, int half, __m256i bytes) {  // four k of eight columns
      __m256i* at = (__m256i*)(to + row / 8 * kStepElems + t * (kTileStep / 2) + row % 8 * 64 + half * 16);
      _mm256_store_si256(at, _mm256_sub_epi16(_mm256_shuffle_epi8(bytes, first), zero_point));
      _mm256_store_si256(at + 2, _mm256_sub_epi16(_mm256_shuffle_epi8(bytes, second), zero_point));
    };
    for (int t = 0; t < 2; t++)
      for (int i = 0; i < 2 * BITS; i++, line += 64)
        for (int half = 0; half < 2; half++) {
          const __m256i bytes = _mm256_loadu_si256((const __m256i*)line + half);
          if (BITS == 8) put(t, i, half, bytes);
          else put(t, 2 * i, half, _mm256_and_si256(bytes, low)), put(t, 2 * i + 1, half, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
        }
  }

  // f(0 or 1, where both are, weights of even k, of odd k) for all pairs of eight columns.
  template <typename F>
  void over_pairs(int s, int count, int part, int16_t* fixed, F&& f) const {
    for (int i = 0; i < count; i++) {
      const long group = q_.group_at(nb_, (s + i) * kStep) + part / 2 * 16;
      const vf scales = load(q_.scales + group), offsets = q_.offsets ? load(q_.offsets + group) : zero();
      const __m256 scale = part % 2 ? scales.b : scales.a, offset = part % 2 ? offsets.b : offsets.a;
      for (int p = 0; p < 16; p++) {
        int16_t* at = fixed + pair_place(part, i * 16 + p);
        const __m256i pairs = _mm256_load_si256((const __m256i*)at);
        f(p % 2, at, _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16)), scale, offset),
          _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16)), scale, offset));
      }
    }
  }

  const Quant& q_;
  int nb_;
};

// The chunk of rows that begins with row0 times block nb. y: [rows][32], room.
template <typename W>
void fixed_block(const Gemm& g, const FixedRows& x, int row0, int rows, int nb, float* y) {
  const int passes = 2 * x.groups();
  W weights(g, nb);
  alignas(64) int16_t fixed[kFixedSteps * kStepElems];
  float units[kCols];
  std::fill(y, y + rows * kCols, 0.f);
  for (int s = 0; s < g.k_steps(); s += kFixedSteps) {
    const int run = s / kFixedSteps, count = std::min(kFixedSteps, g.k_steps() - s);
    Fetch fetch{(const char*)weights.stored(s) + kFixedAhead, (W::kLines + passes - 1) / passes};
    weights.fix(s, count, fixed, units);
    for (int i = 0; i < x.groups(); i++) fixed_group(x, i, run, fixed, count, units, fetch, y + x.begin(i) * kCols, kCols);
  }
  for (int r = 0; r < rows; r++) finish_row(g, row0 + r, nb * kCols, load(y + r * kCols), load(y + r * kCols + 16));
}

// memory: sums, then the chunk as integers.
inline void run_fixed(const Gemm& g, int threads) {
  const long k = long(g.k_steps()) * kStep;
  const auto block = g.compact ? fixed_block<FixedCompact> : g.quant->bits == 8 ? fixed_block<FixedQuant<8>> : fixed_block<FixedQuant<4>>;
  auto integers = [&](float* memory, int rows) { return FixedRows(memory + rows * kCols, rows, k); };
  over_chunks(
      g, threads, kFixedPiece / (k * sizeof(int16_t)), [&](int rows) { return rows * kCols * sizeof(float) + FixedRows::bytes(rows, k); },
      [&](float* memory, int row0, int rows) { integers(memory, rows).fill(g.k, [&](int r) { return g.x + (row0 + r) * g.ldx; }); },
      [&](float* memory, int row0, int rows, int nb) { block(g, integers(memory, rows), row0, rows, nb, memory); });
}

}  // namespace

#endif
