// Building blocks of fixed-point products on vector units: one instruction multiplies twice as many 16-bit integers as
// floats.
//
// A run of k of a row or column is stored as integers times a power of two, its unit, chosen so that the Euclidean norm
// of the run is 16000 to 32000 units. By Cauchy-Schwarz no sum of products overflows 32 bits, and no sum is rounded.
// Entries of 128 units or more are exact, since a bf16 has 8 bits; smaller ones are rounded to whole units, by at most
// 1/32000 of the norm: a fifth to a fifteenth of the error of the earlier rounding to bf16. The tiles are those of
// vector_tiles.h.
#pragma once

#include "vector_tiles.h"

namespace {

constexpr int kFixedSteps = 8;  // k-steps of a run; its weights, 16 KiB, stay in L1 while all rows of a chunk use them
constexpr int kFixedRun = kFixedSteps * 32;

constexpr long runs_of(long k_steps) { return (k_steps + kFixedSteps - 1) / kFixedSteps; }

// Returns the position in the tiles of pair p of k, for register `part` of 32 columns.
inline long pair_place(int part, long p) { return tile_place(part * kLanes) + p / 16 * kTileStep + p % 16 * 32; }

// Returns the units of runs with these sums of squares. If a sum is not finite (norm of 2^64 or more), the unit is
// infinite, so that the results are not finite either; below a norm of 2^-74 it is zero.
inline Floats fixed_unit(Floats squares) {
  return Floats(Ints(root(squares) * set1_floats(1.f / 16000)) & set1_ints(0x7f800000));
}

// Rows as integers, in groups of at most kMostRows, ordered by run, then group, then pair of k, so that a block of the
// weight reads them front to back.
class FixedRows {
 public:
  // Fill() stores kLanes pairs at a time
  FixedRows(void* memory, int rows, long k)
      : values_((int16_t*)memory), units_((float*)(values_ + rows * k + 2 * kLanes)), k_(k), rows_(rows) {}
  static constexpr size_t bytes(long rows, long k) {
    return (rows * k + 2 * kLanes) * sizeof(int16_t) + rows * runs_of(k / 32) * sizeof(float);
  }

  int groups() const { return (rows_ + kMostRows - 1) / kMostRows; }
  int begin(int group) const { return int(long(rows_) * group / groups()); }
  int size(int group) const { return begin(group + 1) - begin(group); }
  const int16_t* at(int group, long run) const { return values_ + place(group, run); }
  const float* units(int group, long run) const { return units_ + run * rows_ + begin(group); }

  // row(r) points to the start of a row of `given` elements; the rest is filled with zeros.
  template <typename F>
  void fill(long given, F&& row) const {
    for (long run = 0; run < runs_of(k_ / 32); run++)
      // Order matters: stores past the end of a group are overwritten by the next group
      for (int i = 0; i < groups(); i++) {
        alignas(64) int16_t integers[kMostRows][kFixedRun];
        for (int r = 0; r < size(i); r++)
          units_[run * rows_ + begin(i) + r] =
              fix_row(row(begin(i) + r) + run * kFixedRun, std::min(given - run * kFixedRun, count(run)), count(run),
                      integers[r]);
        interleave(integers, size(i), count(run) / 2, values_ + place(i, run));
      }
  }

 private:
  long count(long run) const { return std::min(long(kFixedRun), k_ - run * kFixedRun); }
  long place(int group, long run) const { return rows_ * run * kFixedRun + begin(group) * count(run); }

  // Converts a run of a row to integers; returns its unit.
  template <typename T>
  static float fix_row(const T* x, long given, long count, int16_t* integers) {
    T padded[kFixedRun];
    if (given < count) {
      std::fill(std::copy(x, x + given, padded), padded + count, T{});
      x = padded;
    }
    vf squares = zero();
    for (long k = 0; k < count; k += 16) squares = fma(load(x + k), load(x + k), squares);
    const float unit = fixed_unit(set1_floats(reduce_add(squares)))[0];
    const vf inverse = set1(unit > 0 ? 1.f / unit : 0.f);
    for (long k = 0; k < count; k += 16) store_words(integers + k, load(x + k) * inverse);
    return unit;
  }

  static void interleave(const int16_t (*integers)[kFixedRun], int rows, long pairs, int16_t* to) {
    for (long p = 0; p < pairs; p += kLanes) {
      Ints v[kLanes];
      for (int r = 0; r < kLanes; r++) v[r] = load_ints(integers[std::min(r, rows - 1)] + 2 * p);
      transpose(v);
      for (int j = 0; j < kLanes; j++, to += 2 * rows) store_ints(to, v[j]);
    }
  }

  int16_t* values_;
  float* units_;  // [run][row]
  long k_;
  int rows_;
};

// in_units returns weights of even and odd k in units, as pairs of integers. Adding 1.5 * 2^23 units puts the number of
// units into a float's low bits.
inline Floats magic_of(Floats unit) { return unit * set1_floats(1.5f * (1 << 23)); }
inline Ints in_units(Floats even, Floats odd, Floats magic) {
  return odd_words(Ints(even + magic), left<16>(Ints(odd + magic)));
}

// y[r * ld + column] += a run of ROWS rows x times 32 columns w, over `count` k-steps.
template <int ROWS>
void fixed_products(const int16_t* x, const float* row_units, const int16_t* w, int count, const float* units,
                    Fetch& fetch, float* y, long ld) {
  for (int c = 0; c < 32; c += 2 * kLanes, w += tile_place(2 * kLanes)) {
    const int16_t* at = x;
    Ints sums[ROWS * 2];
    unrolled<ROWS * 2>([&](auto i) __attribute__((always_inline)) { sums[i] = Ints{}; });
    for (int s = 0; s < count; s++) {
      fetch.step();
      const int16_t* tile = w + s * kTileStep;
      for (int p = 0; p < 16; p++, at += 2 * ROWS) {
        const Ints v[2] = {load_ints(tile + p * 32), load_ints(tile + p * 32 + tile_place(kLanes))};
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          int pair;
          memcpy(&pair, at + 2 * r, 4);
          unrolled<2>([&](auto i) __attribute__((always_inline)) {
            sums[r * 2 + i] = add_products(sums[r * 2 + i], v[i], set1_ints(pair));
          });
        });
      }
    }
    unrolled<2>([&](auto i) __attribute__((always_inline)) {
      const Floats column_units = load_floats(units + c + i * kLanes);
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        float* to = y + r * ld + c + i * kLanes;
        store_floats(to, fma(to_floats(sums[2 * r + i]) * set1_floats(row_units[r]), column_units, load_floats(to)));
      });
    });
  }
}

// Like fixed_products, for run `run` of a group of rows.
inline void fixed_group(const FixedRows& x, int group, long run, const int16_t* w, int count, const float* units,
                        Fetch& fetch, float* y, long ld) {
  of_rows(x.size(group),
          [&](auto n) { fixed_products<n>(x.at(group, run), x.units(group, run), w, count, units, fetch, y, ld); });
}

// Converts a run of `count` k-steps of 32 columns from bf16 to integers in place. units: [32].
inline void fix_tiles(bf16* tiles, int count, float* units) {
  for (int part = 0; part < 32 / kLanes; part++) {
    Floats squares[4] = {};
    for (int p = 0; p < count * 16; p += 2)
      unrolled<2>([&](auto i) __attribute__((always_inline)) {
        const Ints pairs = load_ints(tiles + pair_place(part, p + i));
        squares[2 * i] = fma(evens(pairs), evens(pairs), squares[2 * i]),
                    squares[2 * i + 1] = fma(odds(pairs), odds(pairs), squares[2 * i + 1]);
      });
    const Floats unit = fixed_unit((squares[0] + squares[1]) + (squares[2] + squares[3])), magic = magic_of(unit);
    store_floats(units + part * kLanes, unit);
    for (int p = 0; p < count * 16; p++) {
      bf16* at = tiles + pair_place(part, p);
      const Ints pairs = load_ints(at);
      store_ints(at, in_units(evens(pairs), odds(pairs), magic));
    }
  }
}

}  // namespace
