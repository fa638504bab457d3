// What products by AVX2 as fixed-point numbers are made of: of integers of 16 bits one instruction multiplies twice as many as of floats.
//
// A run of k of a row, and of a column, is written as integers times a power of two, its unit, such that its Euclidean norm is 16000 to 32000 units.
// So no sum of products leaves 32 bits (Cauchy-Schwarz), and none is rounded. Entries of 128 units and more are what they were, for a bf16 has 8 bits; smaller ones are rounded
// to whole units, by at most 1/32000 of the norm: a fifth to a fifteenth of the error that rounding to bf16 has made before. Tiles are those of vector_tiles.h.
#pragma once

#include "vector_tiles.h"

#if !defined(__AVX512F__)

namespace {

constexpr int kFixedSteps = 8;  // k-steps of a run, whose weights, 16 KiB, stay in L1 while all rows of a chunk meet them
constexpr int kFixedRun = kFixedSteps * 32;

constexpr long runs_of(long k_steps) { return (k_steps + kFixedSteps - 1) / kFixedSteps; }

// Where pair p of k lies in tiles, of the columns 8 * part .. 8 * part + 7 of 32.
inline long pair_place(int part, long p) { return part / 2 * (kTileStep / 2) + part % 2 * 16 + p / 16 * kTileStep + p % 16 * 32; }

// The units of runs that have these sums of squares. Where they are no finite number, from a norm of 2^64 on, infinite, so that results are not finite either; below one of 2^-74 zero.
inline __m256 fixed_unit(__m256 squares) {
  return _mm256_and_ps(_mm256_sqrt_ps(squares) * _mm256_set1_ps(1.f / 16000), _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)));
}

// Rows as integers, in groups of at most kMostRows: run by run, in a run group by group, in a group pair of k by pair of k. So a block of the weight reads them front to back.
class FixedRows {
 public:
  FixedRows(void* memory, int rows, long k) : values_((int16_t*)memory), units_((float*)(values_ + rows * k + 16)), k_(k), rows_(rows) {}  // eight pairs are stored at a time
  static constexpr size_t bytes(long rows, long k) { return (rows * k + 16) * sizeof(int16_t) + rows * runs_of(k / 32) * sizeof(float); }

  int groups() const { return (rows_ + kMostRows - 1) / kMostRows; }
  int begin(int group) const { return int(long(rows_) * group / groups()); }
  int size(int group) const { return begin(group + 1) - begin(group); }
  const int16_t* at(int group, long run) const { return values_ + place(group, run); }
  const float* units(int group, long run) const { return units_ + run * rows_ + begin(group); }

  // row(r) is a row's start; it has `given` elements, and zeros from there on.
  template <typename F>
  void fill(long given, F&& row) const {
    for (long run = 0; run < runs_of(k_ / 32); run++)
      for (int i = 0; i < groups(); i++) {  // in order: what is stored beyond a group is in the next one's place
        alignas(32) int16_t integers[kMostRows][kFixedRun];
        for (int r = 0; r < size(i); r++)
          units_[run * rows_ + begin(i) + r] = fix_row(row(begin(i) + r) + run * kFixedRun, std::min(given - run * kFixedRun, count(run)), count(run), integers[r]);
        interleave(integers, size(i), count(run) / 2, values_ + place(i, run));
      }
  }

 private:
  long count(long run) const { return std::min(long(kFixedRun), k_ - run * kFixedRun); }
  long place(int group, long run) const { return rows_ * run * kFixedRun + begin(group) * count(run); }

  // Returns the unit.
  template <typename T>
  static float fix_row(const T* x, long given, long count, int16_t* integers) {
    T padded[kFixedRun];
    if (given < count) {
      std::fill(std::copy(x, x + given, padded), padded + count, T{});
      x = padded;
    }
    vf squares = zero();
    for (long k = 0; k < count; k += 16) squares = fma(load(x + k), load(x + k), squares);
    const float unit = _mm256_cvtss_f32(fixed_unit(_mm256_set1_ps(reduce_add(squares))));
    const vf inverse = set1(unit > 0 ? 1.f / unit : 0.f);
    for (long k = 0; k < count; k += 16) {
      const vf scaled = load(x + k) * inverse;
      const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(scaled.a), _mm256_cvtps_epi32(scaled.b));
      _mm256_store_si256((__m256i*)(integers + k), _mm256_permute4x64_epi64(words, 0xd8));
    }
    return unit;
  }

  static void interleave(const int16_t (*integers)[kFixedRun], int rows, long pairs, int16_t* to) {
    for (long p = 0; p < pairs; p += 8) {
      __m256i v[8];
      for (int r = 0; r < 8; r++) v[r] = _mm256_load_si256((const __m256i*)(integers[std::min(r, rows - 1)] + 2 * p));
      transpose_8x8(v);
      for (int j = 0; j < 8; j++, to += 2 * rows) _mm256_storeu_si256((__m256i*)to, v[j]);
    }
  }

  int16_t* values_;
  float* units_;  // of each run and row
  long k_;
  int rows_;
};

// Weights of even k and of odd k in units, as pairs. Adding 1.5 * 2^23 units leaves in a float's lower bits how many units it is.
inline __m256 magic_of(__m256 unit) { return unit * _mm256_set1_ps(1.5f * (1 << 23)); }
inline __m256i in_units(__m256 even, __m256 odd, __m256 magic) {
  return _mm256_blend_epi16(_mm256_castps_si256(even + magic), _mm256_slli_epi32(_mm256_castps_si256(odd + magic), 16), 0xaa);
}

// y[r * ld + column] += a run of ROWS rows x times 32 columns w, `count` k-steps of it.
template <int ROWS>
void fixed_products(const int16_t* x, const float* row_units, const int16_t* w, int count, const float* units, Fetch& fetch, float* y, long ld) {
  for (int t = 0; t < 2; t++, w += kTileStep / 2) {
    const int16_t* at = x;
    __m256i sums[ROWS * 2];
    unrolled<ROWS * 2>([&](auto i) { sums[i] = _mm256_setzero_si256(); });
    for (int s = 0; s < count; s++) {
      fetch.step();
      const int16_t* tile = w + s * kTileStep;
      for (int p = 0; p < 16; p++, at += 2 * ROWS) {
        const __m256i v[2] = {_mm256_load_si256((const __m256i*)(tile + p * 32)), _mm256_load_si256((const __m256i*)(tile + p * 32 + 16))};
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          int pair;
          memcpy(&pair, at + 2 * r, 4);
          const __m256i one = _mm256_set1_epi32(pair);
          unrolled<2>([&](auto half) __attribute__((always_inline)) {
            sums[r * 2 + half] = _mm256_add_epi32(sums[r * 2 + half], _mm256_madd_epi16(v[half], one));
            asm("" : "+x"(sums[r * 2 + half]));  // or the compiler adds products to each other first, for which there are too few registers
          });
        });
      }
    }
    const vf column_units = load(units + t * 16);
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      float* to = y + r * ld + t * 16;
      const vf total = {_mm256_cvtepi32_ps(sums[2 * r]), _mm256_cvtepi32_ps(sums[2 * r + 1])};
      store(to, fma(total * set1(row_units[r]), column_units, load(to)));
    });
  }
}

// The same for run `run` of a group of rows.
inline void fixed_group(const FixedRows& x, int group, long run, const int16_t* w, int count, const float* units, Fetch& fetch, float* y, long ld) {
  static constexpr void (*kWays[])(const int16_t*, const float*, const int16_t*, int, const float*, Fetch&, float*, long) = {fixed_products<1>, fixed_products<2>, fixed_products<3>,
                                                                                                                          fixed_products<4>, fixed_products<5>, fixed_products<6>};
  kWays[x.size(group) - 1](x.at(group, run), x.units(group, run), w, count, units, fetch, y, ld);
}

// A run of `count` k-steps of 32 columns from bf16 to integers, in place. units: [32].
inline void fix_tiles(bf16* tiles, int count, float* units) {
  for (int part = 0; part < 4; part++) {
    __m256 squares[4] = {};
    for (int p = 0; p < count * 16; p += 2)
      unrolled<2>([&](auto i) __attribute__((always_inline)) {
        const __m256i pairs = load_pairs(tiles + pair_place(part, p + i));
        squares[2 * i] = _mm256_fmadd_ps(evens(pairs), evens(pairs), squares[2 * i]), squares[2 * i + 1] = _mm256_fmadd_ps(odds(pairs), odds(pairs), squares[2 * i + 1]);
      });
    const __m256 unit = fixed_unit((squares[0] + squares[1]) + (squares[2] + squares[3])), magic = magic_of(unit);
    _mm256_storeu_ps(units + part * 8, unit);
    for (int p = 0; p < count * 16; p++) {
      __m256i* at = (__m256i*)(tiles + pair_place(part, p));
      const __m256i pairs = _mm256_loadu_si256(at);
      _mm256_storeu_si256(at, in_units(evens(pairs), odds(pairs), magic));
    }
  }
}

}  // namespace

#endif
