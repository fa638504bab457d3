// See lora_tiles.h.
#include "lora_tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "paired_rows.h"

namespace {

constexpr long kPair = 32;  // rows of two tiles

// The packed layer that has block `block` of a chain of layers, and the block's number there.
const Linear* layer_of(const Linear* linear, long& block) {
  for (; linear->next && block >= linear->n / kCols; linear = linear->next) block -= linear->n / kCols;
  return linear;
}

// What the sums of 32 columns are multiplied by before they are the product.
float scale_of(const Linear* linear, long block) {
  if (!linear) return 1.f;
  const Linear* layer = layer_of(linear, block);
  return layer->compact ? layer->compact->scales[block] : 1.f;
}

// Writes B's columns 16 i .. of the part, divided by `scale`, as right operands. Returns whether all are finite: others
// would reach rows without the adapter.
bool pack_columns_of_b(const LoraPart& part, long i, float scale, bf16* to) {
  const LoraSteps steps(part.rank);
  const bf16* b = (const bf16*)part.b + i / 2 * part.rank * 32 + i % 2 * 16;  // of rank r: b + 32 r
  bool finite = true;
  for (long s = 0; s < steps.wide + steps.narrow; s++)
    for (long k = 0; k < (s < steps.wide ? 32 : 16); k++) {
      const long r = s * 32 + k;
      for (long c = 0; c < 16; c++) {
        const bool given = r < part.rank && i * 16 + c < part.columns;
        bf16& value = to[s * 512 + k / 2 * 32 + c * 2 + k % 2];
        value = to_bf16(given ? to_float(b[r * 32 + c]) / scale : 0.f);
        finite &= std::isfinite(to_float(value));
      }
    }
  return finite;
}

#if QUIRE_AMX
// Writes 16 values as high and low numbers `apart` from each other.
void split(vf value, bf16* to, long apart) {
  store(to, value);
  store(to + apart, value - load(to));
}

// The rows of a pair that have an adapter, and their scales.
struct PairRows {
  uint32_t has = 0;
  float scales[kPair];
  PairRows(const LoraRows& g, const LoraStep& step, long pair) {
    const long begin = step.begin + pair * kPair, end = std::min(begin + kPair, step.end);
    const int64_t *first = std::lower_bound(g.rows, g.rows + g.count, begin),
                  *last = std::lower_bound(first, g.rows + g.count, end);
    for (; first < last; first++) {
      has |= 1u << (*first - begin);
      scales[*first - begin] = g.scales ? g.scales[first - g.rows] : 1.f;
    }
  }
  bool upper() const { return has & 0xffff; }
  bool lower() const { return has >> 16; }
};

thread_local Scratch inner_scratch, sums_scratch;

// Computes the inner rows of one adapter for one pair.
class Inner {
 public:
  Inner(const LoraMatrices& m, long k_steps)
      : m_(m), k_steps_(k_steps), columns_((m.rank + 15) / 16 * 16),
        sums_((float*)sums_scratch.get(kPair * ld() * sizeof(float))) {
    for (long r = 0; r < kPair; r++) store(sums_ + r * ld() + columns_, zero());
  }

  void compute(const bf16* x, long ldx, const PairRows& rows, long count, bf16* to) {
    multiply(x, ldx, rows.upper(), rows.lower());
    for (long r = 0; r < count; r++, to += m_.tiles->width) {
      if (!(rows.has >> r & 1)) {
        memset(to, 0, m_.tiles->width * sizeof(bf16));
        continue;
      }
      bf16* at = to;
      for (const LoraPart *p = m_.parts, *end = p + m_.num_parts; p < end; p++)
        at = write(*p, sums_ + r * ld() + p->first, set1(rows.scales[r]), at);
    }
  }

 private:
  long ld() const { return columns_ + 16; }  // a vector may begin at the last column

  void multiply(const bf16* x, long ldx, bool upper, bool lower) {
    alignas(64) char spare[1024];
    for (long c = 0; c < columns_; c += 32) {
      const bool both = columns_ - c > 16;
      const bf16 *a = m_.tiles->a + c * k_steps_ * kStep, *left = x;
      TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      for (long s = 0; s < k_steps_; s++, a += both ? 1024 : 512, left += kStep) {
        TILE_LOAD(6, a, 64);
        if (both) TILE_LOAD(7, a + 512, 64);
        if (upper) {
          TILE_LOAD(4, left, ldx * 2);
          TILE_DP(0, 4, 6);
          if (both) TILE_DP(1, 4, 7);
        }
        if (lower) {
          TILE_LOAD(5, left + 16 * ldx, ldx * 2);
          TILE_DP(2, 5, 6);
          if (both) TILE_DP(3, 5, 7);
        }
        if (s % kKeepAwake == 0) TILE_STORE(6, spare, 64);
      }
      float *first = sums_ + c, *second = first + 16 * ld();
      if (upper) { TILE_STORE(0, first, ld() * 4); TILE_STORE(1, first + 16, ld() * 4); }
      if (lower) { TILE_STORE(2, second, ld() * 4); TILE_STORE(3, second + 16, ld() * 4); }
    }
  }

  // Writes a part of an inner row. Returns its end. What follows the part's ranks is multiplied by zeros.
  bf16* write(const LoraPart& part, const float* sums, vf scale, bf16* at) {
    const LoraSteps steps(part.rank);
    for (long s = 0; s < steps.wide; s++, sums += 32, at += 64)
      split(load(sums) * scale, at, 32), split(load(sums + 16) * scale, at + 16, 32);
    if (steps.narrow) split(load(sums) * scale, at, 16), at += 32;
    return at;
  }

  const LoraMatrices& m_;
  long k_steps_, columns_;
  float* sums_;
};

// Adds 16 columns of sums to bf16 or float32 rows.
template <typename O>
void add_columns(const float* sums, O* out, long ldo, long rows, long width) {
  for (long r = 0; r < rows; r++, sums += 16, out += ldo) {
    if (width >= 16) {
      store(out, load(out) + load(sums));
      continue;
    }
    for (long c = 0; c < width; c++) store_scalar(out + c, to_float(out[c]) + sums[c]);
  }
}
#endif

}  // namespace

LoraSums::LoraSums(const LoraStep& step, const bf16* x, long ldx) {
#if QUIRE_AMX
  if (!step.count || !amx_permitted()) return;
  struct Piece {
    const LoraMatrices* matrices;
    PairRows rows;
    int pair;
    size_t span;
  };
  const long rows = step.end - step.begin, pairs = (rows + kPair - 1) / kPair;
  std::vector<Piece> pieces;
  size_t size = 0;
  for (const LoraRows *g = step.groups, *last = g + step.count; g < last; g++) {
    const LoraMatrices& m = g->layers[step.layer];
    if (!m.a || !m.tiles) continue;
    const size_t span = spans_.size(), before = pieces.size();
    for (int p = 0; p < pairs; p++)
      if (const PairRows found(*g, step, p); found.has) pieces.push_back({&m, found, p, span});
    if (pieces.size() == before) continue;
    spans_.push_back({m.tiles, std::vector<Pair>(pairs)});
    size += (pieces.size() - before) * kPair * m.tiles->width;
  }
  if (pieces.empty()) return;
  bf16* memory = (bf16*)inner_scratch.get(size * sizeof(bf16));
  for (const Piece& p : pieces) {
    spans_[p.span].pairs[p.pair] = {memory, p.rows.upper(), p.rows.lower()};
    memory += kPair * p.matrices->tiles->width;
  }
  Gemm g{};
  g.x = x, g.ldx = ldx, g.m = int(rows), g.k = int(pieces[0].matrices->k);
  const bool few = rows <= kPair;
  std::optional<PaddedRows> padded;
  std::optional<PairedRows> paired;
  if (few) padded.emplace(g, kStep);
  else paired.emplace(g);
  Stretches stretches(long(pieces.size()), Pool::get().threads());
  auto work = [&] {
    TileScope tiles(int(std::min(rows, 16L)), 64, few ? int(std::max(rows - 16, 0L)) : 0);
    const int own = stretches.own();
    for (long i; stretches.take(own, i);) {
      const Piece& p = pieces[i];
      Inner inner(*p.matrices, g.k_steps());
      inner.compute(few ? padded->rows : paired->pair(p.pair), few ? padded->ld : paired->ld(p.pair), p.rows,
                    std::min(rows, kPair), spans_[p.span].pairs[p.pair].inner);
    }
  };
  if (pieces.size() == 1) work();  // waking other threads costs more than it saves
  else Pool::get().run(work);
#endif
}

template <typename O>
bool add_lora_tiles(const LoraStep& step, const bf16* x, long ldx, O* out, long ldo) {
#if QUIRE_AMX
  const LoraSums sums(step, x, ldx);
  if (!sums) return false;
  long width = 0;
  for (const LoraRows *g = step.groups, *last = g + step.count; g < last; g++)
    for (long i = 0; g->layers[step.layer].a && i < g->layers[step.layer].num_parts; i++) {
      const LoraPart& part = g->layers[step.layer].parts[i];
      width = std::max(width, part.at + part.columns);
    }
  const long rows = step.end - step.begin, blocks = (width + kCols - 1) / kCols, pairs = (rows + kPair - 1) / kPair;
  Stretches stretches(blocks * pairs, Pool::get().threads());
  Pool::get().run([&] {
    TileScope tiles;
    LoraBlock adds(&sums);
    alignas(64) float c[4][16][16];
    const int own = stretches.own();
    for (long i; stretches.take(own, i);) {
      const long pair = i / blocks, block = i % blocks, row = pair * kPair;
      TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      adds.open(block);
      adds.add(int(pair));
      TILE_STORE(0, c[0], 64); TILE_STORE(1, c[1], 64); TILE_STORE(2, c[2], 64); TILE_STORE(3, c[3], 64);
      for (int t = 0; t < 4; t++) {
        const long r = row + t / 2 * 16, column = block * kCols + t % 2 * 16;
        add_columns(c[t][0], out + r * ldo + column, ldo, std::min(16L, rows - r), width - column);
      }
    }
  });
  return true;
#else
  return false;
#endif
}

template bool add_lora_tiles(const LoraStep&, const bf16*, long, bf16*, long);
template bool add_lora_tiles(const LoraStep&, const bf16*, long, float*, long);

extern "C" {

// Returns the bf16 elements of the tiles of B of a module; 0 without AMX.
long quire_lora_tiles_elements(long rank, long columns) {
#if QUIRE_AMX
  if (!amx_permitted()) return 0;
#else
  return 0;
#endif
  const LoraSteps steps(rank);
  return (columns + 15) / 16 * steps.size();
}

// Packs the parts of `m`, bf16, to b, and fills `columns` [num_columns], which must be zero, and tiles->width. linear:
// the layer whose products they are added to; null: none, they are added to rows in memory. Returns false if 16 columns
// of the layer have more than one part, if a value is not finite, or if the layer's sums cannot be added to.
bool quire_lora_tiles_pack(const LoraMatrices* m, const Linear* linear, LoraTiles* tiles, bf16* b, LoraColumns* columns,
                           long num_columns) {
  for (const Linear* l = linear; l && l->next; l = l->next)
    if (l->n % kCols) return false;
  tiles->columns = columns, tiles->num_columns = num_columns, tiles->width = 0;
  for (const LoraPart *p = m->parts, *end = p + m->num_parts; p < end; p++) {
    if (p->at % 16) return false;
    const LoraSteps steps(p->rank);
    for (long i = 0; i < (p->columns + 15) / 16; i++, b += steps.size()) {
      const long place = (p->at + i * p->step) / 16;
      const float scale = scale_of(linear, place / 2);
      if (place >= num_columns || columns[place].b || scale == 0.f) return false;
      if (!pack_columns_of_b(*p, i, scale, b)) return false;
      columns[place] = {b, tiles->width, steps.wide, steps.narrow};
    }
    tiles->width += steps.width();
  }
  return true;
}
}
