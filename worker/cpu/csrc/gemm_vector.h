// Products on vector units for any number of rows: used without AMX, or for few rows of a quantized weight.
#pragma once

#include <vector>

#include "gemm.h"
#include "quant_rows.h"
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
  const int lines = (g.compact ? Compact::kStepWords : kStepElems) / 32,
            passes = rows <= kRowsOfAll ? 1 : kPasses * x.count();
  const int run = rows == 1 ? 1 : kVectorRun;  // for one row it is fastest to use a weight as soon as it is expanded
  for (int s = 0, steps; s < g.k_steps(); s += steps) {
    steps = std::min(run, g.k_steps() - s);
    if constexpr (kMostInRegisters > 0)
      if (g.compact && rows <= kMostInRegisters) {
        // Up to the k-step of the next exception
        const long until = std::min(long(*exceptions >> 32) - long(nb) * g.k_steps(), long(g.k_steps()));
        if (until > s) {
          steps = int(until) - s;
          of_rows(rows, [&](auto n) {
            if constexpr (n <= kMostInRegisters)
              compact_rows<n>(x.at(0, long(s) * kStep), g.compact->step(nb, s), steps, sums);
          });
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
    for (int i = 0; i < x.count(); i++)
      vector_group(x.size(i), x.at(i, long(s) * kStep), w, steps, fetch, sums + x.begin(i) * kCols, kCols);
  }
  for (int r = 0; r < rows; r++)
    finish_row(g, row0 + r, nb * kCols, load(sums + r * kCols), load(sums + r * kCols + 16));
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
      for (int nb = int(i % pieces * per), end = std::min(int(nb + per), g.n_blocks()); nb < end; nb++)
        block(memory, chunk, nb);
    }
  });
}

// `memory` holds the sums, then the chunk as floats.
inline void run_vector(const std::vector<Gemm>& products, int threads) {
  const long k = long(products[0].k_steps()) * kStep;
  auto floats = [&](float* memory, const Chunk& c) { return Groups(memory + c.rows * kCols, k, c.rows); };
  over_chunks(
      products, threads, kVectorPiece / (k * sizeof(float)),
      [&](int rows) { return (rows * kCols + Groups::floats(k, rows)) * sizeof(float); },
      [&](float* memory, const Chunk& c) {
        floats(memory, c).fill(c.g->k, [&](int r) { return c.g->x + (c.row0 + r) * c.g->ldx; });
      },
      [&](float* memory, const Chunk& c, int nb) {
        vector_block(*c.g, floats(memory, c), c.row0, c.rows, nb, memory);
      });
}

// --- quantized weights -----------------------------------------------------------------------------------------------

}  // namespace

// Multiplies x by block nb of a weight: y [rows][32]. The function for a kind of weights, in files that are compiled at
// the same time: kinds with a table of scales or with SuperScales, activations of 16 or 8 bits.
using QuantBlock = void (*)(const Quant& q, const IntegerRows& x, int nb, float* y);
QuantBlock table_block(int kind), super_block(int kind), narrow_table_block(int kind), narrow_super_block(int kind);
inline QuantBlock quant_block_of(const Quant& q) {
  if (q.narrow) return is_super_kind(q.kind) ? narrow_super_block(q.kind) : narrow_table_block(q.kind);
  return is_super_kind(q.kind) ? super_block(q.kind) : table_block(q.kind);
}

namespace {

// `memory` holds the sums, then the chunk as integers.
inline void run_quant_vector(const std::vector<Gemm>& products, int threads) {
  const Quant& q = *products[0].quant;
  const QuantBlock block = quant_block_of(q);
  auto integers = [&](float* memory, const Chunk& c) {
    return IntegerRows(memory + c.rows * kCols, c.rows, *c.g->quant);
  };
  over_chunks(
      products, threads, kVectorPiece / (long(q.k_steps) * 64 * IntegerRows::dwords(q)),
      [&](int rows) { return rows * kCols * sizeof(float) + IntegerRows::bytes(rows, q); },
      [&](float* memory, const Chunk& c) {
        integers(memory, c).fill(c.g->k, [&](int r) { return c.g->x + (c.row0 + r) * c.g->ldx; });
      },
      [&](float* memory, const Chunk& c, int nb) {
        block(*c.g->quant, integers(memory, c), nb, memory);
        for (int r = 0; r < c.rows; r++)
          finish_row(*c.g, c.row0 + r, nb * kCols, load(memory + r * kCols), load(memory + r * kCols + 16));
      });
}

// --- 8-bit floats ----------------------------------------------------------------------------------------------------

// y[ROWS][32] += k0 .. k1 - 1 (whole spans) of a group x of `FloatGroups` times block nb of 8-bit floats, in the order
// of k.
template <int ROWS>
void e4m3_part(const Quant& q, const float* x, int nb, long k0, long k1, Fetch& fetch, float* y) {
  constexpr bool STREAM = kLanes == 16 && ROWS <= 4;
  for (int column = 0; column < kCols; column += 2 * kLanes)
    for (long begin = k0; begin < k1; begin += q.span()) {
      const long end = std::min<long>(begin + q.span(), k1);
      Floats sums[2][ROWS] = {};
      for (long k = begin; k < end; k += 32) {
        const uint8_t* lines[2] = {codes_at(q, nb, int(k), column), codes_at(q, nb, int(k), column + kLanes)};
        fetch.step();
        const float* at = x + k * ROWS;
        for (int i = 0; i < 8; i++, at += 4 * ROWS) {
          if (STREAM) read_ahead(lines[0] + i * 64), read_ahead(lines[1] + i * 64);
          const Ints codes[2] = {load_ints(lines[0] + i * 64), load_ints(lines[1] + i * 64)};
          unrolled<4>([&](auto j) __attribute__((always_inline)) {
            const Floats w[2] = {widen_e4m3<j>(codes[0]), widen_e4m3<j>(codes[1])};
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
              const Floats one = set1_floats(at[j * ROWS + r]);
              sums[0][r] = fma(w[0], one, sums[0][r]), sums[1][r] = fma(w[1], one, sums[1][r]);
            });
          });
        }
      }
      const float* scales = (const float*)q.scales + q.group_at(nb, int(begin)) + column;
      unrolled<2>([&](auto p) __attribute__((always_inline)) {
        const Floats scale = load_floats(scales + p * kLanes);
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
          float* to = y + r * kCols + column + p * kLanes;
          store_floats(to, fma(sums[p][r], scale, load_floats(to)));
        });
      });
    }
}

// y[rows of x][32] = x times block nb.
inline void e4m3_block(const Quant& q, const FloatGroups& x, int rows, int nb, float* y) {
  const bool stream = kLanes == 16 && rows <= 4;
  const long width = long(q.k_steps) * 64, part = stream ? width : 512;
  const int passes = 32 / (2 * kLanes) * x.count();
  std::fill(y, y + rows * kCols, 0.f);
  for (long k = 0; k < width; k += part) {
    Fetch fetch{(const char*)q.step(nb, int(k / 64)) + kVectorAhead, stream ? 0 : (16 + passes - 1) / passes};
    for (int i = 0; i < x.count(); i++)
      of_rows(x.size(i), [&](auto n) {
        e4m3_part<n>(q, x.at(i, 0), nb, k, std::min(k + part, width), fetch, y + x.begin(i) * kCols);
      });
  }
}

inline void run_e4m3(const std::vector<Gemm>& products, int threads) {
  const long k = long(products[0].quant->k_steps) * 64;
  auto floats = [&](float* memory, const Chunk& c) { return FloatGroups(memory + c.rows * kCols, k, c.rows); };
  over_chunks(
      products, threads, kVectorPiece / (k * sizeof(float)),
      [&](int rows) { return (rows * kCols + FloatGroups::floats(k, rows)) * sizeof(float); },
      [&](float* memory, const Chunk& c) {
        floats(memory, c).fill(c.g->k, [&](int r) { return c.g->x + (c.row0 + r) * c.g->ldx; });
      },
      [&](float* memory, const Chunk& c, int nb) {
        e4m3_block(*c.g->quant, floats(memory, c), c.rows, nb, memory);
        for (int r = 0; r < c.rows; r++)
          finish_row(*c.g, c.row0 + r, nb * kCols, load(memory + r * kCols), load(memory + r * kCols + 16));
      });
}

}  // namespace
