// See lora_tiles.h.
#include "lora_tiles.h"

#include <algorithm>

#include "paired_rows.h"

namespace {

constexpr long kPair = 32;  // rows of two tiles
// At least one in so many rows of the pairs that an adapter is multiplied with must have it: for fewer, float vectors
// multiply the rows one by one faster.
constexpr long kMostRowsPerRow = 8;

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

// Writes B's columns 16 i .. of the part, divided by `scale`, as right operands.
void pack_columns_of_b(const LoraPart& part, long i, float scale, bf16* to) {
  const LoraSteps steps(part.rank);
  const bf16* b = (const bf16*)part.b + i / 2 * part.rank * 32 + i % 2 * 16;  // of rank r: b + 32 r
  for (long s = 0; s < steps.wide + steps.narrow; s++)
    for (long k = 0; k < 32; k++) {
      const long r = s * 32 + (s < steps.wide ? k : k % 16);
      for (long c = 0; c < 16; c++) {
        const bool given = r < part.rank && i * 16 + c < part.columns;
        to[s * 512 + k / 2 * 32 + c * 2 + k % 2] = to_bf16(given ? to_float(b[r * 32 + c]) / scale : 0.f);
      }
    }
}

#if QUIRE_AMX
// Writes 16 values as high and low numbers `apart` from each other.
void split(vf value, bf16* to, long apart) {
  store(to, value);
  store(to + apart, value - load(to));
}

// Computes the inner rows of one adapter for one pair.
class Inner {
 public:
  Inner(const LoraMatrices& m, long k_steps)
      : m_(m), k_steps_(k_steps), columns_((m.rank + 31) / 32 * 32), sums_(kPair * ld() + 16) {}

  // scales: of the rows of the pair
  void compute(const bf16* x, long ldx, const float* scales, bf16* to) {
    multiply(x, ldx);
    for (long r = 0; r < kPair; r++, to += m_.tiles->width) {
      bf16* at = to;
      for (const LoraPart *p = m_.parts, *end = p + m_.num_parts; p < end; p++)
        at = write(*p, sums_.data() + r * ld() + p->first, set1(scales[r]), at);
    }
  }

 private:
  long ld() const { return columns_ + 16; }  // a vector may begin at the last column

  void multiply(const bf16* x, long ldx) {
    for (long c = 0; c < columns_; c += 32) {
      TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      amx_tiles_2x2(x, ldx, m_.tiles->a + c * k_steps_ * kStep, int(k_steps_));
      float *upper = sums_.data() + c, *lower = upper + 16 * ld();
      TILE_STORE(0, upper, ld() * 4); TILE_STORE(1, upper + 16, ld() * 4);
      TILE_STORE(2, lower, ld() * 4); TILE_STORE(3, lower + 16, ld() * 4);
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
  std::vector<float> sums_;
};

thread_local Scratch inner_scratch;

// The scales of the rows of a pair, zero for rows without the adapter. Returns whether any row has it.
bool scales_of_pair(const LoraRows& g, const LoraStep& step, long pair, float* scales) {
  const long begin = step.begin + pair * kPair, end = std::min(begin + kPair, step.end);
  const int64_t *first = std::lower_bound(g.rows, g.rows + g.count, begin),
                *last = std::lower_bound(first, g.rows + g.count, end);
  if (first == last) return false;
  std::fill(scales, scales + kPair, 0.f);
  for (; first < last; first++) scales[*first - begin] = g.scales ? g.scales[first - g.rows] : 1.f;
  return true;
}

// One adapter's share of a step: the pairs that have rows of it.
struct Share {
  const LoraRows* group;
  const LoraMatrices* matrices;
  std::vector<int> pairs;
};

// Returns the adapters that have matrices for the layer and rows in the step; none if tiles would not pay.
std::vector<Share> shares(const LoraStep& step) {
  const long pairs = (step.end - step.begin + kPair - 1) / kPair;
  std::vector<Share> found;
  long given = 0, multiplied = 0;
  for (const LoraRows *g = step.groups, *last = g + step.count; g < last; g++) {
    const LoraMatrices& m = g->layers[step.layer];
    if (!m.a) continue;
    Share share{g, &m, {}};
    float scales[kPair];
    for (int p = 0; p < pairs; p++)
      if (scales_of_pair(*g, step, p, scales)) share.pairs.push_back(p);
    if (share.pairs.empty()) continue;
    if (!m.tiles) return {};
    given += std::lower_bound(g->rows, g->rows + g->count, step.end) -
             std::lower_bound(g->rows, g->rows + g->count, step.begin);
    multiplied += long(share.pairs.size()) * kPair;
    found.push_back(std::move(share));
  }
  if (multiplied > kMostRowsPerRow * given) found.clear();
  return found;
}

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
  const std::vector<Share> found = shares(step);
  const long rows = step.end - step.begin, pairs = (rows + kPair - 1) / kPair;
  if (found.empty() || rows <= kPair) return;
  struct Piece {
    const Share* share;
    int pair;
    bf16* inner;
  };
  std::vector<Piece> pieces;
  size_t size = 0;
  for (const Share& s : found) size += s.pairs.size() * kPair * s.matrices->tiles->width;
  bf16* memory = (bf16*)inner_scratch.get(size * sizeof(bf16));
  for (const Share& s : found) {
    spans_.push_back({s.matrices->tiles, std::vector<const bf16*>(pairs)});
    for (int p : s.pairs) {
      pieces.push_back({&s, p, memory});
      spans_.back().inner[p] = memory;
      memory += kPair * s.matrices->tiles->width;
    }
  }
  const long k = found[0].matrices->k, k_steps = (k + kStep - 1) / kStep;
  Gemm g{};
  g.x = x, g.ldx = ldx, g.m = int(rows), g.k = int(k);
  const PairedRows paired(g);
  Stretches stretches(long(pieces.size()), Pool::get().threads());
  Pool::get().run([&] {
    TileScope tiles;
    const int own = stretches.own();
    for (long i; stretches.take(own, i);) {
      const Piece& piece = pieces[i];
      float scales[kPair];
      scales_of_pair(*piece.share->group, step, piece.pair, scales);
      Inner inner(*piece.share->matrices, k_steps);
      inner.compute(paired.pair(piece.pair), paired.ld(piece.pair), scales, piece.inner);
    }
  });
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
    alignas(64) float c[4][16][16];
    const int own = stretches.own();
    for (long i; stretches.take(own, i);) {
      const long pair = i / blocks, block = i % blocks, row = pair * kPair;
      TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
      sums.add(int(pair), block);
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
  return (columns + 15) / 16 * (steps.wide + steps.narrow) * 512;
}

// Packs the parts of `m`, bf16, to b, and fills `columns` [num_columns], which must be zero, and tiles->width. linear:
// the layer whose products they are added to; null: none, they are added to rows in memory. Returns false if 16 columns
// of the layer have more than one part, or if the layer's sums cannot be added to.
bool quire_lora_tiles_pack(const LoraMatrices* m, const Linear* linear, LoraTiles* tiles, bf16* b, LoraColumns* columns,
                           long num_columns) {
  for (const Linear* l = linear; l && l->next; l = l->next)
    if (l->n % kCols) return false;
  tiles->columns = columns, tiles->num_columns = num_columns, tiles->width = 0;
  for (const LoraPart *p = m->parts, *end = p + m->num_parts; p < end; p++) {
    if (p->at % 16) return false;
    const LoraSteps steps(p->rank);
    const long each = (steps.wide + steps.narrow) * 512;
    for (long i = 0; i < (p->columns + 15) / 16; i++, b += each) {
      const long place = (p->at + i * p->step) / 16;
      const float scale = scale_of(linear, place / 2);
      if (place >= num_columns || columns[place].b || scale == 0.f) return false;
      pack_columns_of_b(*p, i, scale, b);
      columns[place] = {b, tiles->width, steps.wide, steps.narrow};
    }
    tiles->width += steps.width();
  }
  return true;
}
}
