// Products of many rows on AMX. Results go to memory, or to a sink, some columns at a time.
#pragma once

#include "lora_tiles.h"
#include "paired_rows.h"

#if QUIRE_AMX

namespace {

// Rows are processed in groups of at most kMaxRows. A group covers all of k if it takes at most kPiece bytes, else k is
// split into runs of at most kRun steps. This piece of the rows stays in L2 while blocks of the weight stream past; the
// first kHot steps of a block stay in L1 while all rows of the group use them. At the end of a run the partial sums of
// kBlocksAtOnce blocks wait in memory; they share L2 with the rows.
constexpr int kMaxRows = 512, kPiece = 1 << 20, kRun = 20, kBlocksAtOnce = 16, kHot = 18;
// With few pairs of tiles, a weight that must be expanded is processed block by block, in runs that stay in L1 with
// their sums.
constexpr int kFewPairs = 4, kRunInL1 = 8;

// The part of the weight in use: k-steps [s0, s1) of block nb. s0 is even.
struct Part {
  int nb = -1, s0 = 0, s1 = 0;
  int steps() const { return s1 - s0; }
  bool operator==(const Part& o) const { return nb == o.nb && s0 == o.s0 && s1 == o.s1; }
};

// Returns parts as tiles and prefetches the next part into L2 in the meantime. A weight that is not stored as tiles is
// expanded just ahead of the first rows that use it. Double buffering, with one part expanded during all products with
// the other, would have to keep both parts in cache.
class WeightStream {
 public:
  WeightStream(const Gemm& g, bf16* buffer) : g_(g), buffer_(buffer) {}
  static long buffer_bytes(const Gemm& g, int max_steps) {
    return g.quant || g.compact ? 2L * max_steps * kStepElems : 0;
  }

  const bf16* tiles(const Part& at) {
    if (!expanded()) return g_.block(at.nb) + size_t(at.s0) * kStepElems;
    part_ = at, step_ = 0, announced_ = next_ == at;
    if (g_.compact) exceptions_ = g_.compact->exceptions_from(at.nb, at.s0);
    expand();
    return buffer_;
  }

  bool expanded() const { return g_.quant || g_.compact; }

  // Expands the next two k-steps of the part, if any remain. The first rows that multiply with the part call this every
  // two k-steps.
  void expand() {
    const int left = part_.steps() - step_, s = part_.s0 + step_;
    if (left <= 0) return;
    bf16* to = buffer_ + step_ * kStepElems;
    if (!announced_) fetch({part_.nb, s + kAhead, s + kAhead + 2});
    for (int i = 0; i < std::min(left, 2); i++) {
      if (g_.quant) dequantize_half(*g_.quant, part_.nb, s / 2, i, to);
      else expand_step<false>(*g_.compact, part_.nb, s + i, exceptions_, to + i * kStepElems);
    }
    step_ += 2;
  }

  // Announces that `next`, if it has steps, is used after `calls` calls of bring(), each of which prefetches a share of
  // it.
  void announce(const Part& next, long calls) {
    next_ = next, lines_ = bytes(next) / 64, calls_ = calls, due_ = 0;
    if (lines_ > 0) at_ = source(next);
  }
  void bring() {
    for (due_ += lines_; due_ >= calls_; due_ -= calls_, at_ += 64) prefetch_l2(at_);
  }

 private:
  static constexpr int kAhead = 4;  // k-steps

  const char* source(const Part& at) const {
    if (g_.compact) return (const char*)g_.compact->step(at.nb, at.s0);
    return g_.quant ? (const char*)g_.quant->step(at.nb, at.s0 / 2)
                    : (const char*)(g_.block(at.nb) + size_t(at.s0) * kStepElems);
  }
  long bytes(const Part& at) const {
    return g_.quant ? at.steps() / 2 * g_.quant->step_bytes()
                    : at.steps() * 2L * (g_.compact ? Compact::kStepWords : kStepElems);
  }
  void fetch(const Part& at) {
    const char* from = source(at);
    for (long i = 0; i < bytes(at); i += 64) prefetch_l2(from + i);
  }

  const Gemm& g_;
  bf16* buffer_;
  Part part_, next_;  // current, announced
  int step_ = 0;  // part_ is expanded up to this step
  const uint64_t* exceptions_ = nullptr;  // a compact weight's exceptions from step_ on
  bool announced_ = false;  // whether part_ was announced
  const char* at_ = nullptr;
  long lines_ = 0, calls_ = 1, due_ = 0;
};

// Finishes the sums of 32 rows and 32 columns row by row while AMX computes the next ones.
class Finisher {
 public:
  explicit Finisher(const Gemm& g) : g_(g) {}
  void take(int pair, int nb) {  // tiles 0 .. 3
    flush();
    TILE_STORE(0, sums_[0], 64); TILE_STORE(1, sums_[1], 64); TILE_STORE(2, sums_[2], 64); TILE_STORE(3, sums_[3], 64);
    row0_ = pair * 32, nb_ = nb, next_ = 0, end_ = std::min(32, g_.m - row0_);
  }
  void row() {
    if (next_ == end_) return;
    if (next_ + kAhead < end_) __builtin_prefetch(place(next_ + kAhead), 1);
    const int tile = next_ / 16 * 2, r = next_ % 16;
    finish_row(g_, row0_ + next_, nb_ * kCols, load(sums_[tile][r]), load(sums_[tile + 1][r]));
    next_++;
  }
  void flush() {
    while (next_ < end_) row();
  }

 private:
  static constexpr int kAhead = 3;  // rows; a store that waits for its cache line delays all later stores
  const char* place(int r) const {
    const long column = g_.gated ? nb_ * 16 : nb_ * kCols;
    return (const char*)g_.out + ((row0_ + r) * g_.ldo + column) * (g_.out_f32 ? 4 : 2);
  }
  const Gemm& g_;
  alignas(64) float sums_[4][16][16];
  int row0_ = 0, nb_ = 0, next_ = 0, end_ = 0;
};

// Partial sums that wait for the next run, 32 rows by 32 columns each: [pair][4][16][16], block after block. The next
// ones are prefetched into L1 while products are added to these: tile loads, and even more so tile stores, that miss L1
// delay the products.
class WaitingSums {
 public:
  WaitingSums(float* memory, int pairs) : memory_(memory), pairs_(pairs) {}
  float* of(int pair, int block) { return memory_ + (size_t(block) * pairs_ + pair) * kElems; }
  void announce(const float* next) { next_ = (const char*)next, end_ = next_ + kElems * sizeof(float); }
  void bring() {
    for (int i = 0; i < 3 && next_ < end_; i++, next_ += 64) __builtin_prefetch(next_, 1);
  }

 private:
  static constexpr int kElems = 1024;
  float* memory_;
  int pairs_;
  const char *next_ = nullptr, *end_ = nullptr;
};

// Multiplies some blocks of the weight by some pairs of tiles of rows.
struct ManyRows {
  Gemm g;  // a copy: with a sink, `out` points to this thread's memory
  const PairedRows& x;
  bf16* room;  // the columns that the sink takes at a time
  WeightStream weights;
  Finisher finisher;
  WaitingSums waiting;  // used if there are several runs
  LoraBlock adds;
  alignas(64) char spare[1024];

  // Computes blocks [nb0, nb1) for the pairs [pair0, pair1). `following` is the block that is used next; -1 if unknown.
  void run(int pair0, int pair1, int nb0, int nb1, int max_run, int following) {
    const int steps = g.k_steps();
    // Then sums stay in the tiles at the end of a run, and the next run starts from them in the opposite order
    const bool one_block = nb1 - nb0 == 1;
    for (int s0 = 0, turn = 0; s0 < steps; s0 += max_run, turn++) {
      const int s1 = std::min(s0 + max_run, steps), first = one_block && turn % 2 ? pair1 - 1 : pair0,
                by = first == pair0 ? 1 : -1;
      for (int nb = nb0; nb < nb1; nb++) {
        const Part at{nb, s0, s1};
        // So that the next columns are written to the start of `room`
        if (g.sink && nb % sink_blocks() == 0) g.out = room - pair0 * 32 * g.ldo - nb * kCols;
        const bf16* w = weights.tiles(at);
        weights.announce(after(at, nb0, nb1, max_run, following), long(pair1 - pair0) * at.steps());
        for (int p = first, left = pair1 - pair0; left > 0; left--, p += by) {
          if (max_run < steps && !one_block)
            waiting.announce(p + 1 < pair1 ? waiting.of(p + 1 - pair0, nb - nb0)
                                           : waiting.of(0, nb + 1 < nb1 ? nb + 1 - nb0 : 0));
          float* sums = waiting.of(p - pair0, nb - nb0);
          begin(s0 == 0, one_block && p == first, sums);
          multiply(p, p == first, at, w);
          if (s1 == steps && g.lora) {
            if (p == first) adds.open(g.lora_block + nb);
            adds.add(p);
          }
          if (s1 == steps) finisher.take(p, nb);
          else if (!one_block || left > 1) store(sums);
        }
        if (g.sink && s1 == steps && (nb + 1) % sink_blocks() == 0)
          hand_over(pair0 * 32, std::min(pair1 * 32, g.m), (nb + 1) * kCols);
      }
    }
  }

 private:
  int sink_blocks() const { return int(g.sink->columns / kCols); }

  void hand_over(int row0, int row1, long end) {  // passes the columns before `end` of these rows to the sink
    finisher.flush();
    g.sink->take(g.sink->context, room, g.ldo, row0, row1 - row0, end - g.sink->columns);
  }

  // Returns a part without steps if the next one is unknown
  Part after(const Part& at, int nb0, int nb1, int max_run, int following) const {
    if (at.nb + 1 < nb1) return {at.nb + 1, at.s0, at.s1};
    if (at.s1 < g.k_steps()) return {nb0, at.s1, std::min(at.s1 + max_run, g.k_steps())};
    return {following, 0, following < 0 ? 0 : std::min(max_run, g.k_steps())};
  }

  static void begin(bool from_zero, bool in_tiles, const float* sums) {
    if (from_zero) { TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    } else if (!in_tiles) {
      TILE_LOAD(0, sums, 64);
      TILE_LOAD(1, sums + 256, 64);
      TILE_LOAD(2, sums + 512, 64);
      TILE_LOAD(3, sums + 768, 64);
    }
  }
  static void store(float* sums) {
    TILE_STORE(0, sums, 64);
    TILE_STORE(1, sums + 256, 64);
    TILE_STORE(2, sums + 512, 64);
    TILE_STORE(3, sums + 768, 64);
  }

  void multiply(int p, bool first, const Part& at, const bf16* w) {
    const bf16* a = x.pair(p) + at.s0 * kStep;
    auto aside = [&](int) { weights.bring(); waiting.bring(); finisher.row(); };
    auto expanding = [&](int s) { if (s % 2 == 0) weights.expand(); aside(s); };  // two k-steps before their use
    if (first && weights.expanded()) amx_tiles_2x2_streaming(a, x.ld(p), w, at.steps(), kHot, spare, expanding);
    else amx_tiles_2x2_streaming(a, x.ld(p), w, at.steps(), kHot, spare, aside);
  }
};

// Returns the number of blocks per piece. Each piece reads its rows once per run, so with several runs pieces are few
// and large.
long blocks_per_piece(long blocks, long groups, long threads, bool in_l1, bool several_runs) {
  if (in_l1) return 1;
  if (!several_runs) return std::max(1L, std::min(4L, blocks * groups / (4 * threads)));
  // The same number for each thread
  const long least = (blocks + kBlocksAtOnce - 1) / kBlocksAtOnce * groups,
             pieces = (least + threads - 1) / threads * threads;
  return std::max(1L, (blocks * groups + pieces - 1) / pieces);
}

void run_many_rows(const Gemm& g, int threads) {
  const int steps = g.k_steps(), blocks = g.n_blocks(), pairs = (g.m + 31) / 32;
  const bool in_l1 = (g.quant || g.compact) && pairs <= kFewPairs;
  const int groups = (pairs * 32 + kMaxRows - 1) / kMaxRows, group = (pairs + groups - 1) / groups;
  const int longest = in_l1 ? kRunInL1 : long(group) * 32 * steps * kStep * 2 <= kPiece ? steps : kRun;
  const int runs = (steps + longest - 1) / longest, max_run = ((steps + runs - 1) / runs + 1) / 2 * 2;
  const long at_once = g.sink ? g.sink->columns / kCols : 1;  // blocks that must stay in one piece
  const long per = (blocks_per_piece(blocks, groups, threads, in_l1, runs > 1) + at_once - 1) / at_once * at_once,
             pieces = (blocks + per - 1) / per;
  const PairedRows x(g);
  Stretches stretches(pieces * groups, threads);
  Pool::get().run([&] {
    TileScope tiles;
    const int own = stretches.own();
    const long buffer = WeightStream::buffer_bytes(g, max_run), sums = runs > 1 ? group * (in_l1 ? 1 : per) * 4096 : 0;
    char* memory = (char*)own_scratch.get(buffer + sums + (g.sink ? group * 32 * g.ldo * 2 : 0));
    ManyRows work{g,
                  x,
                  (bf16*)(memory + buffer + sums),
                  WeightStream(g, (bf16*)memory),
                  Finisher(work.g),
                  WaitingSums((float*)(memory + buffer), group),
                  LoraBlock(g.lora)};
    for (long i; stretches.take(own, i);) {
      const int pair0 = int(i / pieces) * group, nb0 = int(i % pieces * per), nb1 = std::min(int(nb0 + per), blocks),
                step = in_l1 ? 1 : nb1 - nb0;
      const int following = i + 1 < stretches.end(own) ? int((i + 1) % pieces * per) : -1;
      for (int nb = nb0; nb < nb1; nb += step)
        work.run(pair0, std::min(pair0 + group, pairs), nb, nb + step, max_run,
                 nb + step < nb1 ? nb + step : following);
    }
    work.finisher.flush();
  });
}

}  // namespace
#endif
