// Products of rows with tiles of keys and values in fixed point.
#pragma once

#include "attention_keys.h"
#include "fixed_tiles.h"

namespace {

inline Ints load_words(const bf16* p) { return load_ints(p); }  // 2 * kLanes elements as words
inline Ints load_words(const int8_t* p) { return words_of_bytes(p); }
inline Ints low_words(const bf16* p) { return widen_words(p); }  // kLanes elements in the low halves of dwords
inline Ints low_words(const int8_t* p) { return widen_signed_bytes(p) & set1_ints(0xffff); }

// Packs 128 keys, as pairs of bf16 or of integers, into k-steps whose columns are keys:
// [128 / 32][d / 32][2 tiles][16 pairs of d][16 keys][2].
template <typename T>
void pair_keys(const T* const* k, long d, bf16* steps) {
  for (int j = 0; j < kKeys; j += kLanes)
    for (long c = 0; c < d; c += 2 * kLanes) {
      Ints r[kLanes];
      unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = load_words(k[j + key] + c); });
      transpose(r);
      bf16* to = steps + j / 32 * 32 * d + c / 32 * kTileStep + tile_place(j % 32) + c % 32 * 16;
      unrolled<kLanes>([&](auto p) __attribute__((always_inline)) { store_ints(to + p * 32, r[p]); });
    }
}

// Packs their values into k-steps whose columns are elements: [d / 32][128 / 32][2 tiles][16 pairs of keys][16 d][2].
template <typename T>
void pair_values(const T* const* v, long d, bf16* steps) {
  for (int j = 0; j < kKeys; j += 2)
    for (long c = 0; c < d; c += kLanes)
      store_ints(steps + c / 32 * 32 * kKeys + j / 32 * kTileStep + tile_place(c % 32) + j % 32 * 16,
                 low_words(v[j] + c) | left<16>(low_words(v[j + 1] + c)));
}

// The arithmetic of attend_rows in fixed point. Each key is a column with its own runs; values are columns of kKeys.
// Keys and values in bytes are taken as they are: a run of 256 entries of at most 127 has a norm below 2032.
template <typename T>
class FixedTiles {
 public:
  static size_t bytes(long rows, long d, long dv) {
    return unit_count(d, dv) * sizeof(float) + kKeys * (d + dv) * sizeof(bf16) + wide_bytes(d, dv) +
           FixedRows::bytes(rows, d);
  }
  // With two scales, the first must be that of whole runs.
  FixedTiles(char* memory, int rows, long d, long dv, bool)
        : d_(d), dv_(dv), k_units_((float*)memory), v_units_(k_units_ + kKeys * runs_of(d / 32)),
          k_((bf16*)(k_units_ + unit_count(d, dv))), v_(k_ + kKeys * d), wide_(v_ + kKeys * dv),
          q_((char*)wide_ + wide_bytes(d, dv), rows, d) {
    if (std::is_same_v<T, int8_t>) std::fill(k_units_, k_units_ + unit_count(d, dv), 1.f);
  }

  int groups() const { return q_.groups(); }
  int begin(int group) const { return q_.begin(group); }
  int size(int group) const { return q_.size(group); }
  template <typename F>
  void queries(F&& row) const { q_.fill(d_, row); }
  void keys(const KeyBlock<T>& keys, int, KeyBlock<T>&, const TwoScales& scales) {
    if constexpr (std::is_same_v<T, e4m3>) {
      const bf16* rows[kKeys];
      widen(keys.k, d_, rows), pair_keys(rows, d_, k_);
      widen(keys.v, dv_, rows), pair_values(rows, dv_, v_);
    } else {
      pair_keys(keys.k, d_, k_), pair_values(keys.v, dv_, v_);
    }
    if (std::is_same_v<T, int8_t> && !scales.first) return;
    for (int b = 0; b < kKeys; b += 32)
      over_runs(b, [&](long run, bf16* tiles, int count, float* units) {
        if constexpr (std::is_same_v<T, int8_t>) std::fill(units, units + 32, 1.f);
        else fix_tiles(tiles, count, units);
        if (scales.first)
          scale_tile(units, run * kFixedRun, run * kFixedRun + 1, dv_, scales.first + b, scales.second + b);
      });
    if (std::is_same_v<T, int8_t>) return;
    for (long c = 0; c < dv_; c += 32) fix_tiles(v_ + c * kKeys, kKeys / 32, v_units_ + c);
  }
  void score(int group, int steps, float* x) {
    for (int b = 0; b < steps * 32; b += 32)
      over_runs(b, [&](long run, const bf16* tiles, int count, const float* units) {
        fixed_group(q_, group, run, (const int16_t*)tiles, count, units, none_, x + b, kKeys);
      });
  }
  void add(int group, int steps, const float* x, float* acc) {
    alignas(64) char memory[FixedRows::bytes(kMostRows, kKeys)];
    const FixedRows weights(memory, size(group), steps * 32);
    weights.fill(steps * 32, [&](int r) { return x + r * kKeys; });
    for (long c = 0; c < dv_; c += 32)
      fixed_group(weights, 0, 0, (const int16_t*)v_ + c * kKeys, steps, v_units_ + c, none_, acc + c, dv_);
  }

 private:
  static long unit_count(long d, long dv) { return kKeys * runs_of(d / 32) + dv; }
  static size_t wide_bytes(long d, long dv) {
    return std::is_same_v<T, e4m3> ? kKeys * std::max(d, dv) * sizeof(bf16) : 0;
  }
  // Converts x, 128 keys or their values, to bf16, which is exact.
  void widen(const T* const* x, long d, const bf16** rows) const {
    for (int j = 0; j < kKeys; j++) {
      bf16* to = wide_ + j * d;
      for (long c = 0; c < d; c += 16) store(to + c, load(x[j] + c));
      rows[j] = to;
    }
  }
  template <typename F>
  void over_runs(int b, F&& f) {  // calls f for each run of the 32 keys from b on
    const long steps = d_ / 32, runs = runs_of(steps);
    for (long run = 0; run < runs; run++)
      f(run, k_ + b * d_ + run * kFixedSteps * kTileStep, int(std::min(long(kFixedSteps), steps - run * kFixedSteps)),
        k_units_ + (b / 32 * runs + run) * 32);
  }

  long d_, dv_;
  float *k_units_, *v_units_;
  bf16 *k_, *v_;  // converted to integers in place
  bf16* wide_;    // of e4m3: keys, then values
  FixedRows q_;
  Fetch none_;
};

}  // namespace
