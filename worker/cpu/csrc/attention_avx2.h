// bf16 attention by AVX2: many rows as products of tiles (vector_tiles.h), few rows, decode, key by key. bf16 becomes float two at a time, by a shift and a mask.
#pragma once

#include "attention_vector.h"
#include "fixed_tiles.h"

#if !defined(__AVX512F__)

namespace {

constexpr int kKeys = 128;               // at a time, of many rows: what is made of them stays in L2, 32 KiB of each K and V
constexpr int kFixedAttentionRows = 32;  // from which on it pays to make integers of them

// --- many rows --------------------------------------------------------------------------------------------------------------------------------------

// kKeys rows of d to tiles whose columns are keys: [kKeys / 32][d / 32] k-steps.
inline void pack_keys(const bf16* const* rows, long d, bf16* tiles) {
  for (int j = 0; j < kKeys; j += 8)
    for (long pair = 0; pair < d / 2; pair += 8) {
      __m256i r[8];
      for (int i = 0; i < 8; i++) r[i] = load_pairs(rows[j + i] + 2 * pair);
      transpose_8x8(r);
      bf16* to = tiles + j / 32 * 32 * d + pair / 16 * kTileStep + j % 32 / 16 * (kTileStep / 2) + pair % 16 * 32 + j % 16 * 2;
      for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i*)(to + i * 32), r[i]);
    }
}

// kKeys rows of d to tiles whose k are keys: [d / 32][kKeys / 32] k-steps.
inline void pack_values(const bf16* const* rows, long d, bf16* tiles) {
  for (int j = 0; j < kKeys; j += 2)
    for (long i = 0; i < d; i += 16) {
      const __m256i a = load_pairs(rows[j] + i), b = load_pairs(rows[j + 1] + i), lo = _mm256_unpacklo_epi16(a, b), hi = _mm256_unpackhi_epi16(a, b);
      __m256i* to = (__m256i*)(tiles + i / 32 * 32 * kKeys + j / 32 * kTileStep + i % 32 / 16 * (kTileStep / 2) + j % 32 * 16);
      _mm256_storeu_si256(to, _mm256_permute2x128_si256(lo, hi, 0x20));
      _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(lo, hi, 0x31));
    }
}

// How attend_rows computes: rows of queries and, beside each other, kKeys keys and values of a KV head, as floats ...
class FloatTiles {
 public:
  static size_t bytes(long rows, long d) { return Groups::floats(d, rows) * sizeof(float) + 2 * kKeys * d * sizeof(bf16); }
  FloatTiles(char* memory, int rows, long d) : d_(d), q_((float*)memory, d, rows), k_((bf16*)(memory + Groups::floats(d, rows) * sizeof(float))), v_(k_ + kKeys * d) {}

  int groups() const { return q_.count(); }
  int begin(int group) const { return q_.begin(group); }
  int size(int group) const { return q_.size(group); }
  template <typename F>
  void queries(F&& row) const { q_.fill(d_, row); }
  void keys(const bf16* const* k, const bf16* const* v) { pack_keys(k, d_, k_), pack_values(v, d_, v_); }

  // x[r][kKeys] += the group's queries times 32 * steps keys.
  void score(int group, int steps, float* x) {
    for (int b = 0; b < steps * 32; b += 32) vector_group(size(group), q_.at(group, 0), k_ + b * d_, int(d_ / 32), none_, x + b, kKeys);
  }
  // acc[r][d] += x[r] times values.
  void add(int group, int steps, const float* x, float* acc) {
    for (long c = 0; c < d_; c += 32) vector_group<kKeys>(size(group), x, v_ + c * kKeys, steps, none_, acc + c, d_);
  }

 private:
  long d_;
  Groups q_;
  bf16 *k_, *v_;
  Fetch none_;
};

// ... or as fixed-point numbers: a key is a column of runs of its own, values are columns of kKeys.
class FixedTiles {
 public:
  static size_t bytes(long rows, long d) { return unit_count(d) * sizeof(float) + 2 * kKeys * d * sizeof(bf16) + FixedRows::bytes(rows, d); }
  FixedTiles(char* memory, int rows, long d)
      : d_(d), k_units_((float*)memory), v_units_(k_units_ + kKeys * runs_of(d / 32)), k_((bf16*)(k_units_ + unit_count(d))), v_(k_ + kKeys * d), q_(v_ + kKeys * d, rows, d) {}

  int groups() const { return q_.groups(); }
  int begin(int group) const { return q_.begin(group); }
  int size(int group) const { return q_.size(group); }
  template <typename F>
  void queries(F&& row) const { q_.fill(d_, row); }
  void keys(const bf16* const* k, const bf16* const* v) {
    pack_keys(k, d_, k_), pack_values(v, d_, v_);
    for (int b = 0; b < kKeys; b += 32) over_runs(b, [&](long, bf16* tiles, int count, float* units) { fix_tiles(tiles, count, units); });
    for (long c = 0; c < d_; c += 32) fix_tiles(v_ + c * kKeys, kKeys / 32, v_units_ + c);
  }
  void score(int group, int steps, float* x) {
    for (int b = 0; b < steps * 32; b += 32)
      over_runs(b, [&](long run, const bf16* tiles, int count, const float* units) { fixed_group(q_, group, run, (const int16_t*)tiles, count, units, none_, x + b, kKeys); });
  }
  void add(int group, int steps, const float* x, float* acc) {
    alignas(32) char memory[FixedRows::bytes(kMostRows, kKeys)];
    const FixedRows weights(memory, size(group), steps * 32);
    weights.fill(steps * 32, [&](int r) { return x + r * kKeys; });
    for (long c = 0; c < d_; c += 32) fixed_group(weights, 0, 0, (const int16_t*)v_ + c * kKeys, steps, v_units_ + c, none_, acc + c, d_);
  }

 private:
  static long unit_count(long d) { return kKeys * runs_of(d / 32) + d; }
  template <typename F>
  void over_runs(int b, F&& f) {  // of 32 keys
    const long steps = d_ / 32, runs = runs_of(steps);
    for (long run = 0; run < runs; run++)
      f(run, k_ + b * d_ + run * kFixedSteps * kTileStep, int(std::min(long(kFixedSteps), steps - run * kFixedSteps)), k_units_ + (b / 32 * runs + run) * 32);
  }

  long d_;
  float *k_units_, *v_units_;
  bf16 *k_, *v_;  // these become integers where they lie
  FixedRows q_;
  Fetch none_;
};

// As attend_vector, for a head_dim that is a multiple of 32.
template <typename Tiles>
void attend_rows(const Step& s, const int* table, const int* tokens, int count, long h0, long h1, long begin, long end, State state, char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim;
  const int g = s.group(), rows = count * g;
  Tiles tiles(memory, rows, d);
  static constexpr float (*kWeigh[])(const Layer&, float*, long, long, float&, float&) = {weigh<2>, weigh<4>, weigh<6>, weigh<8>};
  for (long h = h0; h < h1; h++) {
    tiles.queries([&](int r) { return (const bf16*)s.q + tokens[r / g] * s.ldq + (h * g + r % g) * d; });
    for (long key = begin / kKeys * kKeys; key < end; key += kKeys) {
      const bf16 *k[kKeys], *v[kKeys];
      for (int j = 0; j < kKeys; j++) {
        const long at = std::min(std::max(key + j, begin), end - 1);
        k[j] = (const bf16*)l.k_cache + l.k_place(table, at) + h * l.k_head;
        v[j] = (const bf16*)l.v_cache + l.v_place(table, at) + h * l.v_head;
      }
      tiles.keys(k, v);
      for (int i = 0; i < tiles.groups(); i++) {
        const int first = tiles.begin(i), size = tiles.size(i);
        const long row0 = (h - h0) * rows + first;
        float *acc = state.acc + row0 * d, x[kMostRows * kKeys] = {};
        const long seen = std::min(end, s.position[tokens[(first + size - 1) / g]] + 1) - key;  // a task's tokens ascend, or all see all its keys
        if (seen <= 0) continue;
        const int steps = int(std::min((seen + 31) / 32, kKeys / 32L));
        tiles.score(i, steps, x);
        for (int r = 0; r < size; r++) {
          const long position = s.position[tokens[(first + r) / g]];
          const float correction = kWeigh[steps - 1](l, x + r * kKeys, std::max(begin, s.first_key(position)) - key, std::min(end, position + 1) - key, state.m[row0 + r],
                                                     state.l[row0 + r]);
          if (correction != 1.f) for (long c = 0; c < d; c += 16) store(acc + r * d + c, load(acc + r * d + c) * set1(correction));
        }
        tiles.add(i, steps, x, acc);
      }
    }
  }
}

// --- few rows ---------------------------------------------------------------------------------------------------------------------------------------

// Lane j of the result is the sum of v[j].
inline __m256 sum_each(const __m256* v) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3])), b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// x[N][16] = q . k of N rows, in halves, and kTile keys. The keys wanted next are fetched evenly on the side: all at once would have to wait for their lines.
template <int N>
void dot_few(const float* const* q, const bf16* const* k, long d, float (*x)[kTile], const Ahead<bf16>* ahead) {
  __m256 sums[N][kTile];
  for (int j = 0; j < kTile; j++) {
    __m256 even[N], odd[N];
    if (ahead) ahead->fetch(ahead->k[j], d);
    unrolled<N>([&](auto r) { even[r] = odd[r] = _mm256_setzero_ps(); });
    for (long i = 0; i < d; i += 16) {
      const __m256i pairs = load_pairs(k[j] + i);
      const __m256 e = evens(pairs), o = odds(pairs);
      unrolled<N>([&](auto r) {
        even[r] = _mm256_fmadd_ps(e, _mm256_loadu_ps(q[r] + i), even[r]);
        odd[r] = _mm256_fmadd_ps(o, _mm256_loadu_ps(q[r] + i + 8), odd[r]);
      });
    }
    unrolled<N>([&](auto r) { sums[r][j] = _mm256_add_ps(even[r], odd[r]); });
  }
  for (int r = 0; r < N; r++) for (int j = 0; j < kTile; j += 8) _mm256_storeu_ps(x[r] + j, sum_each(sums[r] + j));
}

// acc[r], in halves, = acc[r] * correction[r] + the sum over keys lo .. hi - 1 of p[r][j] v[j].
template <int N>
void add_few(const float (*p)[kTile], const float* correction, const bf16* const* v, int lo, int hi, float* acc, long d, const Ahead<bf16>* ahead) {
  int fetched = 0;
  for (long i = 0; i < d; i += 16) {
    for (; ahead && fetched < kTile * (i + 16) / d; fetched++) ahead->fetch(ahead->v[fetched], d);
    __m256 even[N], odd[N];
    unrolled<N>([&](auto r) {
      even[r] = _mm256_mul_ps(_mm256_loadu_ps(acc + r * d + i), _mm256_set1_ps(correction[r]));
      odd[r] = _mm256_mul_ps(_mm256_loadu_ps(acc + r * d + i + 8), _mm256_set1_ps(correction[r]));
    });
    for (int j = lo; j < hi; j++) {
      const __m256i pairs = load_pairs(v[j] + i);
      const __m256 e = evens(pairs), o = odds(pairs);
      unrolled<N>([&](auto r) {
        const __m256 weight = _mm256_broadcast_ss(&p[r][j]);
        even[r] = _mm256_fmadd_ps(e, weight, even[r]);
        odd[r] = _mm256_fmadd_ps(o, weight, odd[r]);
      });
    }
    unrolled<N>([&](auto r) {
      _mm256_storeu_ps(acc + r * d + i, even[r]);
      _mm256_storeu_ps(acc + r * d + i + 8, odd[r]);
    });
  }
}

// How attend_vector computes here. Queries, and sums until they are complete, are in halves: of 16 floats first those at even places, then those at odd ones.
struct FewRows {
  static constexpr int kRows = 4;  // that share the loads of K and V
  static size_t bytes(long rows, long d) { return rows * d * sizeof(float); }  // rows: of all heads
  const float* q;
  long rows, h0, d;

  FewRows(const Step& s, const int* tokens, int rows, long h0, long h1, char* memory) : q((const float*)memory), rows(rows), h0(h0), d(s.layer.head_dim) {
    const AnyRows<bf16> given(s, tokens, rows, h0, h1, nullptr);
    for (long h = h0; h < h1; h++)
      for (int r = 0; r < rows; r++)
        for (long i = 0; i < d; i += 16) {
          const __m256i pairs = load_pairs(given.query(h, r) + i);
          float* to = (float*)memory + ((h - h0) * rows + r) * d + i;
          _mm256_storeu_ps(to, evens(pairs)), _mm256_storeu_ps(to + 8, odds(pairs));
        }
  }
  const float* query(long h, int row) const { return q + ((h - h0) * rows + row) * d; }
  static void dot(int n, const float* const* q, const bf16* const* k, long d, float (*x)[kTile], const Ahead<bf16>* ahead) {
    static constexpr void (*kWays[])(const float* const*, const bf16* const*, long, float (*)[kTile], const Ahead<bf16>*) = {dot_few<1>, dot_few<2>, dot_few<3>, dot_few<4>};
    kWays[n - 1](q, k, d, x, ahead);
  }
  static void add(int n, const float (*p)[kTile], const float* correction, const bf16* const* v, int lo, int hi, float* acc, long d, const Ahead<bf16>* ahead) {
    static constexpr void (*kWays[])(const float (*)[kTile], const float*, const bf16* const*, int, int, float*, long, const Ahead<bf16>*) = {add_few<1>, add_few<2>, add_few<3>, add_few<4>};
    kWays[n - 1](p, correction, v, lo, hi, acc, d, ahead);
  }
  static void finish(float* x, long d) {
    for (long i = 0; i < d; i += 16) {
      const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8), lo = _mm256_unpacklo_ps(a, b), hi = _mm256_unpackhi_ps(a, b);
      _mm256_storeu_ps(x + i, _mm256_permute2f128_ps(lo, hi, 0x20));
      _mm256_storeu_ps(x + i + 8, _mm256_permute2f128_ps(lo, hi, 0x31));
    }
  }
};

}  // namespace

#endif
