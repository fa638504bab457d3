// Products of many rows by AVX2 as fixed-point numbers: of integers of 16 bits one instruction multiplies twice as many as of floats.
//
// A run of k of a row, and of a column of the weight, is written as integers times a power of two, its step, such that it is 16000 to 32000 steps long (its Euclidean norm).
// So no sum of products leaves 32 bits (Cauchy-Schwarz), and none is rounded. Entries of 128 steps and more are what they were, for a bf16 has 8 bits; smaller ones are rounded
// to whole steps, by at most 1/32000 of the norm: a fifth to a fifteenth of the error that rounding activations to bf16 has made before.
#pragma once

#include "gemm_avx2.h"

#if !defined(__AVX512F__)

namespace {

constexpr int kFixedRows = 16;             // from which on it pays: preparing a weight costs as much as twelve rows do
constexpr int kFixedLogitRows = kMostGreedy + 1;  // the largest logit must be the same whether it alone is wanted or all
constexpr int kFixedSteps = 8;             // k-steps of a run, whose weights, 16 KiB, stay in L1 while all rows of a chunk meet them
constexpr int kFixedRun = kFixedSteps * kStep;
constexpr long kFixedPiece = 1 << 20;      // bytes of the rows of a chunk
constexpr long kFixedAhead = 16 << 10;     // bytes that the memory is ahead

// The steps of runs that have these sums of squares. Where they are no finite number, from a norm of 2^64 on, infinite, so that results are not finite either.
inline vf fixed_step(vf squares) {
  auto step = [](__m256 s) { return _mm256_and_ps(_mm256_sqrt_ps(s) * _mm256_set1_ps(1.f / 16000), _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000))); };
  return {step(squares.a), step(squares.b)};
}

struct FixedRows {
  int16_t* values;
  float* steps;  // of each row and run
  long k, ld, runs;

  FixedRows(void* memory, long rows, long k) : values((int16_t*)memory), k(k), ld(k + 32), runs((k + kFixedRun - 1) / kFixedRun) { steps = (float*)(values + rows * ld); }
  static size_t bytes(long rows, long k) { return rows * (2 * (k + 32) + 4 * ((k + kFixedRun - 1) / kFixedRun)); }

  // x has `given` elements, and zeros from there on.
  void fill(long row, const bf16* x, long given) const {
    for (long i = 0; i < runs; i++) {
      const long begin = i * kFixedRun, count = std::min(long(kFixedRun), k - begin);
      const bf16* from = x + begin;
      bf16 padded[kFixedRun];
      if (begin + count > given) {
        std::fill(std::copy(from, x + given, padded), padded + count, bf16{0});
        from = padded;
      }
      vf squares = zero();
      for (long j = 0; j < count; j += 16) squares = fma(load(from + j), load(from + j), squares);
      const vf step = fixed_step(set1(reduce_add(squares)));
      const float size = _mm256_cvtss_f32(step.a);
      const vf inverse = set1(size > 0 ? 1.f / size : 0.f);
      for (long j = 0; j < count; j += 16) {
        const vf scaled = load(from + j) * inverse;
        const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(scaled.a), _mm256_cvtps_epi32(scaled.b));
        _mm256_storeu_si256((__m256i*)(values + row * ld + begin + j), _mm256_permute4x64_epi64(words, 0xd8));
      }
      steps[row * runs + i] = size;
    }
  }
};

// A run of a block, w [count][2 tiles][16][16 columns][2], to integers of which steps [32] are the columns' steps. Adding 1.5 * 2^23 steps leaves in a float's lower bits how
// many steps it is. `out` may be w.
inline void fix_weights(const bf16* w, int count, int16_t* out, float* steps) {
  for (int half = 0; half < 4; half++) {  // eight columns
    auto for_pairs = [&](auto&& f) {
      for (int s = 0; s < count; s++)
        for (int p = 0; p < 16; p++) f(long(s) * kTileStep + half / 2 * (kTileStep / 2) + p * 32 + half % 2 * 16, p % 4);
    };
    __m256 squares[8] = {};
    for_pairs([&](long at, int i) __attribute__((always_inline)) {
      const __m256i pairs = load_pairs(w + at);
      squares[2 * i] = _mm256_fmadd_ps(evens(pairs), evens(pairs), squares[2 * i]);
      squares[2 * i + 1] = _mm256_fmadd_ps(odds(pairs), odds(pairs), squares[2 * i + 1]);
    });
    const __m256 all = ((squares[0] + squares[1]) + (squares[2] + squares[3])) + ((squares[4] + squares[5]) + (squares[6] + squares[7]));
    const __m256 step = fixed_step({all, all}).a, magic = step * _mm256_set1_ps(1.5f * (1 << 23));
    _mm256_storeu_ps(steps + half * 8, step);
    for_pairs([&](long at, int) __attribute__((always_inline)) {
      const __m256i pairs = load_pairs(w + at), even = _mm256_castps_si256(evens(pairs) + magic), odd = _mm256_castps_si256(odds(pairs) + magic);
      _mm256_storeu_si256((__m256i*)(out + at), _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa));
    });
  }
}

// y[ROWS][32] += run `run` of ROWS rows from `row` on times weights w of that run, `count` k-steps.
template <int ROWS>
void fixed_products(const FixedRows& x, long row, long run, const int16_t* w, int count, const float* steps, Fetch& fetch, float* y) {
  for (int t = 0; t < 2; t++, w += kTileStep / 2) {
    const int16_t* at = x.values + row * x.ld + run * kFixedRun;
    __m256i sums[ROWS * 2];
    unrolled<ROWS * 2>([&](auto i) { sums[i] = _mm256_setzero_si256(); });
    for (int s = 0; s < count; s++) {
      fetch.step();
      const int16_t* tile = w + s * kTileStep;
      for (int p = 0; p < 16; p++, at += 2) {
        const __m256i v[2] = {_mm256_loadu_si256((const __m256i*)(tile + p * 32)), _mm256_loadu_si256((const __m256i*)(tile + p * 32 + 16))};
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          int pair;
          memcpy(&pair, at + r * x.ld, 4);
          const __m256i one = _mm256_set1_epi32(pair);
          unrolled<2>([&](auto half) __attribute__((always_inline)) {
            sums[r * 2 + half] = _mm256_add_epi32(sums[r * 2 + half], _mm256_madd_epi16(v[half], one));
            asm("" : "+x"(sums[r * 2 + half]));  // as in gemm_avx2.h
          });
        });
      }
    }
    const vf column_steps = load(steps + t * 16);
    unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
      float* to = y + r * kCols + t * 16;
      const vf total = {_mm256_cvtepi32_ps(sums[2 * r]), _mm256_cvtepi32_ps(sums[2 * r + 1])};
      store(to, fma(total * set1(x.steps[(row + r) * x.runs + run]), column_steps, load(to)));
    });
  }
}

// K-steps s .. s + count - 1 of block nb as bf16, in `room` or where they are; beyond g.k zeros, which no compact weight has there.
inline const bf16* expand_run(const Gemm& g, int nb, int s, int count, const uint64_t*& exceptions, bf16* room) {
  if (!g.compact) return g.block(nb) + s * kStepElems;
  for (int i = 0; i < count; i++) expand_step<false>(*g.compact, nb, s + i, exceptions, room + i * kStepElems);
  for (long k = g.k; k < long(s + count) * kStep; k++)
    for (int c = 0; c < kCols; c++) room[(k / kStep - s) * kStepElems + c / 16 * (kTileStep / 2) + k % kStep / 2 * 32 + c % 16 * 2 + k % 2] = bf16{0};
  return room;
}

// The chunk of rows that begins with row0 times block nb. y: [rows][32], room.
inline void fixed_block(const Gemm& g, const FixedRows& x, int row0, int rows, int nb, float* y) {
  using Products = void (*)(const FixedRows&, long, long, const int16_t*, int, const float*, Fetch&, float*);
  static constexpr Products kWays[] = {fixed_products<1>, fixed_products<2>, fixed_products<3>, fixed_products<4>, fixed_products<5>, fixed_products<6>};
  const Groups groups(nullptr, 0, rows);
  const uint64_t* exceptions = g.compact ? g.compact->exceptions_from(nb, 0) : nullptr;
  const int lines = (g.compact ? Compact::kStepWords : kStepElems) / 32, passes = 2 * groups.count();
  alignas(64) bf16 expanded[kFixedSteps * kStepElems];
  int16_t* const fixed = (int16_t*)expanded;
  float steps[kCols];
  std::fill(y, y + rows * kCols, 0.f);
  for (int run = 0; run < x.runs; run++) {
    const int s = run * kFixedSteps, count = std::min(kFixedSteps, g.k_steps() - s);
    const char* stored = g.compact ? (const char*)g.compact->step(nb, s) : (const char*)(g.block(nb) + s * kStepElems);
    Fetch fetch{stored + kFixedAhead, (lines + passes - 1) / passes};
    fix_weights(expand_run(g, nb, s, count, exceptions, expanded), count, fixed, steps);
    for (int i = 0; i < groups.count(); i++) kWays[groups.size(i) - 1](x, groups.begin(i), run, fixed, count, steps, fetch, y + groups.begin(i) * kCols);
  }
  for (int r = 0; r < rows; r++) finish_row(g, row0 + r, nb * kCols, load(y + r * kCols), load(y + r * kCols + 16));
}

// memory: sums, then the chunk as integers.
inline void run_fixed(const Gemm& g, int threads) {
  const long k = long(g.k_steps()) * kStep;
  auto integers = [&](float* memory, int rows) { return FixedRows(memory + rows * kCols, rows, k); };
  over_chunks(
      g, threads, kFixedPiece / (k * sizeof(int16_t)), [&](int rows) { return rows * kCols * sizeof(float) + FixedRows::bytes(rows, k); },
      [&](float* memory, int row0, int rows) { for (int r = 0; r < rows; r++) integers(memory, rows).fill(r, g.x + (row0 + r) * g.ldx, g.k); },
      [&](float* memory, int row0, int rows, int nb) { fixed_block(g, integers(memory, rows), row0, rows, nb, memory); });
}

}  // namespace

#endif
