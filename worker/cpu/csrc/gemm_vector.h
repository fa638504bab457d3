// Products on vector units for any number of rows: used without AMX, or for few rows of a quantized weight.
#pragma once

#include <vector>

#include "gemm.h"
#include "vector_tiles.h"

namespace {

// kVectorRun k-steps of a block (8 KiB) stay in L1 while all rows of a chunk use them; the rows of a chunk
// (kVectorPiece bytes) stay in L2 across blocks. The weight is prefetched kVectorAhead bytes before its use, spread
// evenly over all products. Each sum adds its products one by one in the order of k, so a row's result does not depend
// on the number of rows.
constexpr int kVectorRun = 4, kVectorPiece = 256 << 10, kVectorAhead = 8 << 10;

// sums[ROWS][32] += a group x of `Groups` times `steps` k-steps of a compact weight without exceptions, in the order of
// vector_tiles. AVX-512 has enough registers to expand weights during the multiplication: speedup 1.05 for one row,
// 1.12 for two to four, 1.07 for six, but 0.95 for eight.
constexpr int kMostInRegisters = kLanes == 16 ? 6 : 0;  // maximum rows
template <int ROWS>
void compact_rows(const float* x, const uint16_t* w, int steps, float* sums) {
  Floats acc[ROWS * 2];
  unrolled<ROWS * 2>([&](auto i) { acc[i] = load_floats(sums + i * 16); });
  for (int i = 0; i < 4 * steps; i++, w += i % 4 ? 96 : 5 * 96, x += 8 * ROWS)  // four pairs of k, of both tiles
    unrolled<2>([&](auto t) __attribute__((always_inline)) {
      const uint16_t* group = w + t * 4 * 96;
      read_ahead(group), read_ahead(group + 32), read_ahead(group + 64);
      Ints pairs[4];
      expand_part(group, pairs);
      unrolled<4>([&](auto v) __attribute__((always_inline)) {
        unrolled<2>([&](auto odd) __attribute__((always_inline)) {
          const Floats one = odd ? odds(pairs[v]) : evens(pairs[v]);
          unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
            Floats& sum = acc[r * 2 + t];
            sum = fma(one, set1_floats(x[(v * 2 + odd) * ROWS + r]), sum);
          });
        });
      });
    });
  unrolled<ROWS * 2>([&](auto i) { store_floats(sums + i * 16, acc[i]); });
}

// Multiplies the chunk that begins with row0 by block nb. sums: scratch, [rows][32].
inline void vector_block(const Gemm& g, const Groups& x, int row0, int rows, int nb, float* sums) {
  std::fill(sums, sums + rows * kCols, 0.f);
  alignas(64) bf16 expanded[kVectorRun * kStepElems];
  const uint64_t* exceptions = g.compact ? g.compact->exceptions_from(nb, 0) : nullptr;
  // Passes over one k-step
  const int lines = (g.compact ? Compact::kStepWords : kStepElems) / 32, passes = rows <= kRowsOfAll ? 1 : kPasses * x.count();
  const int run = rows == 1 ? 1 : kVectorRun;  // for one row it is fastest to use a weight as soon as it is expanded
  for (int s = 0, steps; s < g.k_steps(); s += steps) {
    steps = std::min(run, g.k_steps() - s);
    if constexpr (kMostInRegisters > 0)
      if (g.compact && rows <= kMostInRegisters) {
        // Up to the k-step of the next exception
        const long until = std::min(long(*exceptions >> 32) - long(nb) * g.k_steps(), long(g.k_steps()));
        if (until > s) {
          steps = int(until) - s;
          of_rows(rows, [&](auto n) { if constexpr (n <= kMostInRegisters) compact_rows<n>(x.at(0, long(s) * kStep), g.compact->step(nb, s), steps, sums); });
          continue;
        }
        steps = 1;
      }
    const bf16* w = g.compact ? (const bf16*)g.compact->step(nb, s) : g.block(nb) + s * kStepElems;
    Fetch fetch{(const char*)w + kVectorAhead, (lines + passes - 1) / passes};
    if (g.compact) {
      for (int i = 0; i < steps; i++) expand_step<false>(*g.compact, nb, s + i, exceptions, expanded + i * kStepElems);
      w = expanded;
    }
    for (int i = 0; i < x.count(); i++) vector_group(x.size(i), x.at(i, long(s) * kStep), w, steps, fetch, sums + x.begin(i) * kCols, kCols);
  }
  for (int r = 0; r < rows; r++) finish_row(g, row0 + r, nb * kCols, load(sums + r * kCols), load(sums + r * kCols + 16));
}

// Some rows of a product.
struct Chunk {
  const Gemm* g;
  int row0, rows;
};

// Returns the rows of all products in chunks of at most max(`rows`, 4 * kMostRows).
inline std::vector<Chunk> chunks_of(const std::vector<Gemm>& products, long rows) {
  const long most = std::max(4L * kMostRows, rows / kMostRows * kMostRows);
  std::vector<Chunk> chunks;
  for (const Gemm& g : products) {
    const int count = int((g.m + most - 1) / most), size = (g.m + count - 1) / count;
    for (int row0 = 0; row0 < g.m; row0 += size) chunks.push_back({&g, row0, std::min(size, g.m - row0)});
  }
  return chunks;
}

// Calls block(memory, chunk, nb) in every thread for each of its blocks and chunks of rows, and fill(memory, chunk)
// before the first block of a chunk. The products have the same n and k. `rows` bounds a chunk as in chunks_of. memory:
// room_bytes(rows of the largest chunk) bytes.
template <typename R, typename C, typename B>
void over_chunks(const std::vector<Gemm>& products, int threads, long rows, R&& room_bytes, C&& fill, B&& block) {
  const std::vector<Chunk> chunks = chunks_of(products, rows);
  int largest = 0;
  for (const Chunk& chunk : chunks) largest = std::max(largest, chunk.rows);
  const Gemm& g = products[0];
  const long per = blocks_per_piece(g, threads, long(products.size())), pieces = (g.n_blocks() + per - 1) / per;
  Stretches stretches(pieces * long(chunks.size()), threads);
  Pool::get().run([&] {
    const int own = stretches.own();
    float* memory = (float*)own_scratch.get(room_bytes(largest));
    const Chunk* last = nullptr;
    for (long i; stretches.take(own, i);) {
      const Chunk& chunk = chunks[i / pieces];
      if (&chunk != last) fill(memory, *(last = &chunk));
      for (int nb = int(i % pieces * per), end = std::min(int(nb + per), g.n_blocks()); nb < end; nb++) block(memory, chunk, nb);
    }
  });
}

// `memory` holds the sums, then the chunk as floats.
inline void run_vector(const std::vector<Gemm>& products, int threads) {
  const long k = long(products[0].k_steps()) * kStep;
  auto floats = [&](float* memory, const Chunk& c) { return Groups(memory + c.rows * kCols, k, c.rows); };
  over_chunks(
      products, threads, kVectorPiece / (k * sizeof(float)), [&](int rows) { return (rows * kCols + Groups::floats(k, rows)) * sizeof(float); },
      [&](float* memory, const Chunk& c) { floats(memory, c).fill(c.g->k, [&](int r) { return c.g->x + (c.row0 + r) * c.g->ldx; }); },
      [&](float* memory, const Chunk& c, int nb) { vector_block(*c.g, floats(memory, c), c.row0, c.rows, nb, memory); });
}

// --- quantized weights -----------------------------------------------------------------------------------------------

// K entries of a block that stay in L1 while all rows of a chunk use them; the maximum run length
constexpr int kPart = 256;

// Returns whether a product of this many rows in total prefetches weights as it uses them.
constexpr bool streams(int rows) { return kLanes == 16 && rows <= 4; }

// y[ROWS][32] += rows `row` to row + ROWS - 1 times k0 .. k1 - 1 (whole runs) of block nb. A step covers 64 k; a group
// of 32 covers half a step. Every other byte or half byte of a line becomes a 16-bit entry of one register.
template <int ROWS, int BITS>
void quant_part(const Gemm& g, const QuantRows& x, long row, int nb, int k0, int k1, Fetch& fetch, float* y) {
  // PARTS: 16-bit registers made from one register of a line. K: entries of k in a line of 64 bytes. TILE: bytes of a
  // tile.
  constexpr int PARTS = 16 / BITS, K = 32 / BITS, TILE = BITS * 128;
  // Independent chains of sums, to hide latency
  constexpr int CHAINS = std::min(PARTS, ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1);
  const Quant& q = *g.quant;
  const int run = q.run(), zero_point = q.zero_point(), stretch = std::min(run, 64);
  const long ld = x.ld, step_bytes = q.step_bytes();
  const Ints low = set1_words((1 << BITS) - 1);
  for (int c = 0; c < kCols; c += 2 * kLanes)
    for (int begin = k0; begin < k1; begin += run) {
      const long i = row * x.runs + begin / x.run;
      Ints sums[CHAINS][ROWS * 2] = {};
      // Cancels the zero point that the stored weights contain
      unrolled<ROWS>([&](auto r) { sums[0][2 * r] = sums[0][2 * r + 1] = set1_ints(-zero_point * x.sum[i + r * x.runs]); });
      const uint8_t* w = q.step(nb, begin / 64) + c / 16 * TILE + begin % 64 * BITS * 2;
      const int16_t *at = x.values + row * ld + begin, *end = at + std::min(run, k1 - begin);
      for (; at < end; w += step_bytes) {
        fetch.step();
        const uint8_t* line = w;
        for (const int16_t* stop = at + stretch; at < stop; at += K, line += 64) {
          if (streams(ROWS)) read_ahead(line), read_ahead(line + TILE);
          unrolled<PARTS>([&](auto part) __attribute__((always_inline)) {
            constexpr int shift = BITS == 8 ? part * 8 : part % 2 * 8 + part / 2 * 4;
            Ints v[2];
            unrolled<2>([&](auto j) __attribute__((always_inline)) {
              v[j] = load_ints(line + (kLanes == 16 ? j * TILE : j * 32));
              if (shift) v[j] = words_right<shift>(v[j]);
              if (shift + BITS < 16) v[j] = v[j] & low;
            });
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
              int pair;
              memcpy(&pair, at + r * ld + part * 2, 4);
              unrolled<2>([&](auto j) __attribute__((always_inline)) {
                Ints& sum = sums[part % CHAINS][r * 2 + j];
                sum = add_products(sum, v[j], set1_ints(pair));
              });
            });
          });
        }
      }
      for (int chain = 1; chain < CHAINS; chain++) unrolled<ROWS * 2>([&](auto i) { sums[0][i] = add_ints(sums[0][i], sums[chain][i]); });
      const long place = q.group_at(nb, begin) + c;
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        const vf scales = q.sixteen(q.scales, place + v * 16);
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          const long j = i + r * x.runs;
          Floats total[kParts];
          unrolled<kParts>([&](auto p) { total[p] = to_floats(sums[0][2 * r + v * kParts + p]); });
          float* to = y + r * kCols + c + v * 16;
          vf sum = fma(whole(total) * set1(x.scale[j]), scales, load(to));
          if (q.offsets) sum = fma(q.sixteen(q.offsets, place + v * 16), set1(float(x.sum[j]) * x.scale[j]), sum);
          store(to, sum);
        });
      });
    }
}

// y[rows][32] = rows row0 .. row0 + rows - 1 times block nb.
template <int BITS>
void quant_sums(const Gemm& g, const QuantRows& x, int row0, int rows, int nb, float* y) {
  const Groups groups(nullptr, 0, rows);
  const int width = g.quant->k_steps * 64, part = streams(rows) ? width : kPart, lines = std::min(g.quant->group, 64) * BITS / 16, passes = kPasses * groups.count();
  std::fill(y, y + rows * kCols, 0.f);
  for (int k = 0; k < width; k += part) {
    Fetch fetch{(const char*)g.quant->step(nb, k / 64) + kVectorAhead, streams(rows) ? 0 : (lines + passes - 1) / passes};
    for (int i = 0; i < groups.count(); i++)
      of_rows(groups.size(i), [&](auto n) { quant_part<n, BITS>(g, x, row0 + groups.begin(i), nb, k, std::min(k + part, width), fetch, y + groups.begin(i) * kCols); });
  }
}

// Like quant_sums for all rows of the chunk, which x holds; then writes them with finish_row.
template <int BITS>
void quant_block(const Chunk& c, const QuantRows& x, int nb, float* y) {
  quant_sums<BITS>(*c.g, x, 0, c.rows, nb, y);
  for (int r = 0; r < c.rows; r++) finish_row(*c.g, c.row0 + r, nb * kCols, load(y + r * kCols), load(y + r * kCols + 16));
}

// `memory` holds the sums, then the chunk as integers.
inline void run_quant_vector(const std::vector<Gemm>& products, int threads) {
  const Quant& q = *products[0].quant;
  const auto block = q.bits == 8 ? quant_block<8> : quant_block<4>;
  auto integers = [&](float* memory, const Chunk& c) { return QuantRows((char*)(memory + c.rows * kCols), c.rows, q); };
  over_chunks(
      products, threads, kVectorPiece / (long(q.k_steps) * 128), [&](int rows) { return rows * kCols * sizeof(float) + QuantRows::bytes(rows, q); },
      [&](float* memory, const Chunk& c) {
        QuantRows x = integers(memory, c);
        for (int r = 0; r < c.rows; r++) x.fill(r, c.g->x + (c.row0 + r) * c.g->ldx, c.g->k, false);
      },
      [&](float* memory, const Chunk& c, int nb) { block(c, integers(memory, c), nb, memory); });
}

}  // namespace
