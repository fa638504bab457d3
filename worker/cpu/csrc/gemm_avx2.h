// Products by AVX2, of any number of rows.
#pragma once

#include "gemm.h"
#include "vector_tiles.h"

#if !defined(__AVX512F__)

namespace {

// kRun k-steps of a block, 8 KiB, stay in L1 while all rows of a chunk meet them, and a chunk's rows, kPiece bytes, stay in L2 while blocks go by. What is read from
// memory is fetched kAhead bytes before, evenly beside all products. Each sum is of its products in the order of k, one after another, so that a row's result is the
// same whatever the number of rows.
constexpr int kRun = 4, kPiece = 256 << 10, kAhead = 8 << 10;

// The chunk that begins with row0 times block nb. sums: [rows][32], room.
inline void vector_block(const Gemm& g, const Groups& x, int row0, int rows, int nb, float* sums) {
  std::fill(sums, sums + rows * kCols, 0.f);
  alignas(64) bf16 expanded[kRun * kStepElems];
  const uint64_t* exceptions = g.compact ? g.compact->exceptions_from(nb, 0) : nullptr;
  const int lines = (g.compact ? Compact::kStepWords : kStepElems) / 32, passes = rows <= kRowsOfPair ? 1 : 2 * x.count();  // both of a k-step
  const int run = rows == 1 ? 1 : kRun;  // one row uses a weight best as soon as it is expanded
  for (int s = 0; s < g.k_steps(); s += run) {
    const int steps = std::min(run, g.k_steps() - s);
    const bf16* w = g.compact ? (const bf16*)g.compact->step(nb, s) : g.block(nb) + s * kStepElems;
    Fetch fetch{(const char*)w + kAhead, (lines + passes - 1) / passes};
    if (g.compact) {
      for (int i = 0; i < steps; i++) expand_step<false>(*g.compact, nb, s + i, exceptions, expanded + i * kStepElems);
      w = expanded;
    }
    for (int i = 0; i < x.count(); i++) vector_group(x.size(i), x.at(i, long(s) * kStep), w, steps, fetch, sums + x.begin(i) * kCols, kCols);
  }
  for (int r = 0; r < rows; r++) finish_row(g, row0 + r, nb * kCols, load(sums + r * kCols), load(sums + r * kCols + 16));
}

// Calls block(memory, row0, rows, nb) in every thread, for each block and chunk of rows that falls to it; chunk(memory, row0, rows) before the first block of a chunk.
// A chunk has at most `rows` rows, or 24 where that is less. memory: room_bytes(its rows).
template <typename R, typename C, typename B>
void over_chunks(const Gemm& g, int threads, long rows, R&& room_bytes, C&& chunk, B&& block) {
  const long most = std::max(4L * kMostRows, rows / kMostRows * kMostRows);
  const int chunks = int((g.m + most - 1) / most), size = (g.m + chunks - 1) / chunks;
  const long per = blocks_per_piece(g, threads), pieces = (g.n_blocks() + per - 1) / per;
  Stretches stretches(pieces * chunks, threads);
  Pool::get().run([&] {
    const int own = stretches.own();
    float* memory = (float*)own_scratch.get(room_bytes(size));
    int last = -1;
    for (long i; stretches.take(own, i);) {
      const int row0 = int(i / pieces) * size, rows = std::min(size, g.m - row0);
      if (row0 != last) chunk(memory, last = row0, rows);
      for (int nb = int(i % pieces * per), end = std::min(int(nb + per), g.n_blocks()); nb < end; nb++) block(memory, row0, rows, nb);
    }
  });
}

// memory: sums, then the chunk as floats.
inline void run_vector(const Gemm& g, int threads) {
  const long k = long(g.k_steps()) * kStep;
  auto floats = [&](float* memory, int rows) { return Groups(memory + rows * kCols, k, rows); };
  over_chunks(
      g, threads, kPiece / (k * sizeof(float)), [&](int rows) { return (rows * kCols + Groups::floats(k, rows)) * sizeof(float); },
      [&](float* memory, int row0, int rows) { floats(memory, rows).fill(g.k, [&](int r) { return g.x + (row0 + r) * g.ldx; }); },
      [&](float* memory, int row0, int rows, int nb) { vector_block(g, floats(memory, rows), row0, rows, nb, memory); });
}

// --- quantized weights ------------------------------------------------------------------------------------------------------------------------------

constexpr int kPart = 256;  // of k, of a block that stays in L1 while all rows of a chunk meet it: the most that a run is long

// y[ROWS][32] += k0 .. k1 - 1, whole runs, of ROWS rows from `row` on times block nb. A step has 64 k; STRETCH: all, or half where a group has 32. Of the bytes or half
// bytes of a line every other one makes a register of 16 bits each.
template <int ROWS, int BITS, int STRETCH>
void quant_part(const Gemm& g, const QuantRows& x, long row, int nb, int k0, int k1, Fetch& fetch, float* y) {
  constexpr int PARTS = 16 / BITS, K = 32 / BITS;  // of a line of 64 bytes: registers for each half of it, and entries of k
  const Quant& q = *g.quant;
  const int run = q.run(), zero_point = q.zero_point();
  const long ld = x.ld, step_bytes = q.step_bytes();
  const __m256i low = _mm256_set1_epi16((1 << BITS) - 1);
  for (int t = 0; t < 2; t++)
    for (int begin = k0; begin < k1; begin += run) {
      const long i = row * x.runs + begin / x.run;
      __m256i sums[ROWS * 2];
      unrolled<ROWS>([&](auto r) { sums[2 * r] = sums[2 * r + 1] = _mm256_set1_epi32(-zero_point * x.sum[i + r * x.runs]); });  // which the stored weights add
      const uint8_t* w = q.step(nb, begin / 64) + t * BITS * 128 + begin % 64 * BITS * 2;
      const int16_t *at = x.values + row * ld + begin, *end = at + std::min(run, k1 - begin);
      for (; at < end; w += step_bytes) {
        fetch.step();
        const uint8_t* line = w;
        for (const int16_t* stop = at + STRETCH; at < stop; at += K, line += 64)
          unrolled<PARTS>([&](auto part) __attribute__((always_inline)) {
            constexpr int shift = BITS == 8 ? part * 8 : part % 2 * 8 + part / 2 * 4;
            __m256i v[2];
            unrolled<2>([&](auto half) __attribute__((always_inline)) {
              v[half] = _mm256_loadu_si256((const __m256i*)line + half);
              if (shift) v[half] = _mm256_srli_epi16(v[half], shift);
              if (shift + BITS < 16) v[half] = _mm256_and_si256(v[half], low);
            });
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
              int pair;
              memcpy(&pair, at + r * ld + part * 2, 4);
              const __m256i one = _mm256_set1_epi32(pair);
              unrolled<2>([&](auto half) __attribute__((always_inline)) {
                sums[r * 2 + half] = _mm256_add_epi32(sums[r * 2 + half], _mm256_madd_epi16(v[half], one));
                asm("" : "+x"(sums[r * 2 + half]));  // or the compiler adds products to each other first, for which there are too few registers
              });
            });
          });
      }
      const long place = q.group_at(nb, begin) + t * 16;
      const vf scales = load(q.scales + place);
      unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
        const long j = i + r * x.runs;
        const vf total = {_mm256_cvtepi32_ps(sums[2 * r]), _mm256_cvtepi32_ps(sums[2 * r + 1])};
        float* to = y + r * kCols + t * 16;
        vf sum = fma(total * set1(x.scale[j]), scales, load(to));
        if (q.offsets) sum = fma(load(q.offsets + place), set1(float(x.sum[j]) * x.scale[j]), sum);
        store(to, sum);
      });
    }
}

// y[rows][32] = rows row0 .. row0 + rows - 1 times block nb.
template <int BITS, int STRETCH>
void quant_sums(const Gemm& g, const QuantRows& x, int row0, int rows, int nb, float* y) {
  using Part = void (*)(const Gemm&, const QuantRows&, long, int, int, int, Fetch&, float*);
  static constexpr Part kWays[] = {quant_part<1, BITS, STRETCH>, quant_part<2, BITS, STRETCH>, quant_part<3, BITS, STRETCH>,
                                   quant_part<4, BITS, STRETCH>, quant_part<5, BITS, STRETCH>, quant_part<6, BITS, STRETCH>};
  const Groups groups(nullptr, 0, rows);
  const int width = g.quant->k_steps * 64, lines = STRETCH * BITS / 16, passes = 2 * groups.count();
  std::fill(y, y + rows * kCols, 0.f);
  for (int k = 0; k < width; k += kPart) {
    Fetch fetch{(const char*)g.quant->step(nb, k / 64) + kAhead, (lines + passes - 1) / passes};
    for (int i = 0; i < groups.count(); i++) kWays[groups.size(i) - 1](g, x, row0 + groups.begin(i), nb, k, std::min(k + kPart, width), fetch, y + groups.begin(i) * kCols);
  }
}

// The same, and what becomes of it.
template <int BITS, int STRETCH>
void quant_block(const Gemm& g, const QuantRows& x, int row0, int rows, int nb, float* y) {
  quant_sums<BITS, STRETCH>(g, x, row0, rows, nb, y);
  for (int r = 0; r < rows; r++) finish_row(g, row0 + r, nb * kCols, load(y + r * kCols), load(y + r * kCols + 16));
}

inline void run_quant_vector(const Gemm& g, int threads) {
  const QuantRows x = quant_rows(g, g.m, false);
  const bool bytes = g.quant->bits == 8, halves = g.quant->group == 32;
  const auto block = bytes ? halves ? quant_block<8, 32> : quant_block<8, 64> : halves ? quant_block<4, 32> : quant_block<4, 64>;
  over_chunks(
      g, threads, kPiece / (x.ld * sizeof(int16_t)), [](int rows) { return rows * kCols * sizeof(float); }, [](float*, int, int) {},
      [&](float* sums, int row0, int rows, int nb) { block(g, x, row0, rows, nb, sums); });
}

}  // namespace

#endif
