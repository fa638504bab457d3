// Computes everything between the attention of one layer and that of the next in one call, and all layers in one call:
// after a gigabyte of weights, the Python code that would make these calls is no longer in cache. The tokens are
// processed in pieces whose activations stay in cache, in a workspace that is allocated once.
#include <algorithm>

#include "gated_rows.h"
#include "gemm.h"
#include "kernels.h"
#include "lora_tiles.h"
#include "mixers.h"
#include "parallel.h"

namespace {

constexpr long kBf16 = 1;  // the `dtype` of other kernels
// Elements between rows of the workspace. Rows at a distance of a multiple of 4 KiB would map to a few cache sets only.
constexpr long kPad = 32;
constexpr long kHalvesAtOnce = 256;  // rows whose gate and up are in float32 at a time

void run(const Linear& linear, const bf16* x, long ldx, bf16* out, long ldo, long rows,
         const LoraSums* lora = nullptr) {
  long block = 0;
  for (const Linear* part = &linear; part; out += part->width(), block += part->n / 32, part = part->next) {
    const LinearRows all{part, 0, rows};
    run_products(&all, 1, x, ldx, out, ldo, false, lora, block);
  }
}

// What adapters add to a layer's product: to its sums, and, the rest, to its outputs.
struct Added {
  LoraSums sums;
  LoraStep rest;
  const LoraSums* in_sums() const { return sums ? &sums : nullptr; }
};

Added added(const Linear& linear, const LoraStep& lora, const bf16* x, long ldx, long rows) {
  for (const Linear* part = &linear; part; part = part->next)
    if (!adds_lora(*part, rows)) return {{}, lora};
  return {{lora, x, ldx}, lora.rest()};
}

// The linear layers of a decoder layer, as `LoraRows::layers` numbers them.
enum AdaptedLinear { kQkv, kO, kGateUp, kDown, kNumAdapted };

// The product, with what adapters add.
void run_adapted(const Linear& linear, const LoraStep& lora, const bf16* x, long ldx, bf16* out, long ldo, long rows) {
  const Added adds = added(linear, lora, x, ldx, rows);
  run(linear, x, ldx, out, ldo, rows, adds.in_sums());
  add_lora(adds.rest, x, ldx, out, ldo);
}

thread_local Scratch halves_scratch;

// The product of a gated layer without its activation, [rows, ldh], with what adapters add. The sums and their rounding
// are those of the product that applies the activation itself.
void run_halves(const Linear& both, const LoraStep& lora, const bf16* x, long ldx, float* halves, long ldh, long rows) {
  const Added adds = added(both, lora, x, ldx, rows);
  const LinearRows all{&both, 0, rows};
  run_products(&all, 1, x, ldx, halves, ldh, true, adds.in_sums());
  add_lora(adds.rest, x, ldx, halves, ldh);
}

// The product of a gated layer, for which adapters add to the gate and up before the activation.
void run_gated(const Linear& linear, const LoraStep& lora, const bf16* x, long ldx, bf16* out, long ldo, long rows) {
  if (const Added adds = added(linear, lora, x, ldx, rows); !adds.rest.applies())
    return run(linear, x, ldx, out, ldo, rows, adds.in_sums());
  const Linear both = ungated(linear);
  for (long t = 0; t < rows; t += kHalvesAtOnce) {
    const long count = std::min(kHalvesAtOnce, rows - t), ldh = both.n + kPad;
    const LoraStep step = lora.rows(lora.begin + t, lora.begin + t + count);
    x += t > 0 ? kHalvesAtOnce * ldx : 0, out += t > 0 ? kHalvesAtOnce * ldo : 0;
    if (!step.applies()) {
      run(linear, x, ldx, out, ldo, count);
      continue;
    }
    float* halves = (float*)halves_scratch.get(kHalvesAtOnce * ldh * sizeof(float));
    run_halves(both, step, x, ldx, halves, ldh, count);
    activate_rows(int(linear.gated), halves, ldh, out, ldo, count, linear.n / 2);
  }
}

// Computes float32 outputs as the torch layers' call does.
void run_float32(const Linear& l, const bf16* x, long ldx, float* out, long rows) {
  constexpr int kFloat32 = 1;  // of `flags`
  if (l.quant) return quire_gemm_run_quant(x, ldx, l.quant, l.bias, out, l.n, rows, l.n, l.k, kFloat32, int(l.path));
  if (l.compact)
    return quire_gemm_run_compact(x, ldx, l.compact, l.bias, out, l.n, rows, l.n, l.k, kFloat32, int(l.path));
  quire_gemm_run(x, ldx, l.packed, l.bias, out, l.n, rows, l.n, l.k, kFloat32, int(l.path));
}

// A mixture of experts.
struct Mixture {
  Linear router;
  Routing routing;
  Experts experts;
};

thread_local Scratch mixture_scratch;

// Replaces x [rows, hidden] by the result of the mixture.
void run_mixture(const Mixture& m, bf16* x, long ldx, long rows) {
  const long chosen = rows * m.routing.top_k;
  int64_t* ids =
      (int64_t*)mixture_scratch.get(chosen * (sizeof(int64_t) + sizeof(float)) + rows * m.router.n * sizeof(float));
  float *weights = (float*)(ids + chosen), *logits = weights + chosen;
  run_float32(m.router, x, ldx, logits, rows);
  quire_route(&m.routing, logits, weights, ids, rows);
  quire_run_experts(&m.experts, x, ldx, ids, weights, x, ldx, rows);
}

// o_proj, the MLP, then the qkv projection of the next layer. The first segment has only the qkv projection; the last
// has o_proj, the MLP and the final norm.
struct Segment {
  Linear o_proj, gate_up, down, qkv;
  const void *mlp_norm, *norm;        // weights of the norms before the MLP, and before qkv or the end
  const void *o_proj_norm, *down_norm;  // and of those after o_proj and after the MLP; null: none
  QkvArgs cache;                      // the next layer's; head_dim 0: Python goes on with the projections `qkv`
  const void* attention;              // the previous layer's `Layer`, for quire_paged_attention
  long group;                         // the next layer's `CacheGroup`
  const Mixture* mixture;             // replaces gate_up and down; null: none
  const StateMixer* mixer;            // the previous layer's, which replaces `attention`; null: none
  long gated;                         // attention's result is multiplied by gates, the columns after the queries
  long at_once;                       // tokens per piece
  long hidden, wide;                  // wide: the weights of the norms are float32
  float eps;
};

// The layers of a cache group share block tables: arguments of quire_paged_attention.
struct CacheGroup {
  const long* slots;
  const int* block_table;
  long ld_table;
  StateStep states;  // of a group of states, which has nothing else
};

void add_norm(const Segment& s, const bf16* x, long ldx, bf16* residual, const void* weight, bf16* out, long ldo,
              long rows) {
  quire_add_rms_norm(x, ldx, residual, s.hidden, weight, out, ldo, rows, s.hidden, s.eps, kBf16, s.wide);
}

// Computes the qkv projection and normalises, rotates and stores each head as soon as a tile of its rows is ready.
// Returns false, with nothing done, if the matmul cannot produce its output head by head.
bool qkv_to_cache(const Segment& s, const bf16* x, long ldx, bf16* out, const long* positions, const long* slots,
                  long rows, const LoraSums* lora) {
  if (!s.cache.head_dim || s.cache.head_dim % 32 != 0 || s.cache.dtype != kBf16 || s.qkv.next || s.cache.gap)
    return false;
  struct Heads { QkvArgs args; const long *positions, *slots; } heads{s.cache, positions, slots};
  heads.args.qkv = out;
  const Sink sink{s.cache.head_dim, &heads,
                  [](void* context, const bf16* x, long ldx, long row, long rows, long column) {
                    const Heads& h = *(const Heads*)context;
                    quire_qkv_head_to_cache(&h.args, column / h.args.head_dim, x, ldx, h.positions, h.slots, row, rows);
                  }};
  return quire_gemm_run_to_sink(x, ldx, s.qkv.packed, s.qkv.quant, s.qkv.compact, s.qkv.bias, &sink, rows, s.qkv.n,
                                s.qkv.k, int(s.qkv.path), lora);
}

// Runs the segment on `rows` tokens. x and inner are workspace, with row strides hidden + kPad and MLP width + kPad.
// lora.layer is the number of the next layer's first linear layer.
void run_tokens(const Segment& s, const bf16* attended, long lda, bf16* residual, bf16* out, const long* positions,
                const long* slots, long rows, bf16* x, bf16* inner, const LoraStep& lora) {
  const LoraStep after = lora.of(lora.layer + kQkv), before = lora.of(lora.layer - kNumAdapted);
  const long ldx = s.hidden + kPad, ldi = s.gate_up.width() + kPad;
  bf16* normed = s.qkv.k ? x : out;
  const long ldn = s.qkv.k ? ldx : s.hidden;
  if (s.o_proj.k) {
    run_adapted(s.o_proj, before.of(before.layer + kO), attended, lda, x, ldx, rows);
    if (s.o_proj_norm) add_norm(s, x, ldx, nullptr, s.o_proj_norm, x, ldx, rows);
    add_norm(s, x, ldx, residual, s.mlp_norm, x, ldx, rows);
    if (s.mixture) run_mixture(*s.mixture, x, ldx, rows);
    else {
      run_gated(s.gate_up, before.of(before.layer + kGateUp), x, ldx, inner, ldi, rows);
      run_adapted(s.down, before.of(before.layer + kDown), inner, ldi, x, ldx, rows);
    }
    if (s.down_norm) add_norm(s, x, ldx, nullptr, s.down_norm, x, ldx, rows);
    add_norm(s, x, ldx, residual, s.norm, normed, ldn, rows);
  } else {
    add_norm(s, residual, s.hidden, nullptr, s.norm, normed, ldn, rows);
  }
  if (!s.qkv.k) return;
  const Added adds = added(s.qkv, after, x, ldx, rows);
  if (!adds.rest.applies() && qkv_to_cache(s, x, ldx, out, positions, slots, rows, adds.in_sums())) return;
  run(s.qkv, x, ldx, out, s.cache.ld_qkv, rows, adds.in_sums());
  add_lora(adds.rest, x, ldx, out, s.cache.ld_qkv);
  if (s.cache.head_dim) quire_qkv_to_cache(&s.cache, out, positions, slots, rows);
}

// Moves the rows in `wanted` (ascending) to the front.
void keep_rows(bf16* x, long ldx, long width, const long* wanted, long num_wanted) {
  for (long i = 0; i < num_wanted; i++) memmove(x + i * ldx, x + wanted[i] * ldx, width * sizeof(bf16));
}

}  // namespace

extern "C" {

// Returns the number of bf16 elements that quire_run_segment needs as `workspace`. inner: the largest width of an MLP.
long quire_segment_workspace(long hidden, long inner, long at_once) { return at_once * (hidden + inner + 2 * kPad); }

// Returns cache_conflicts (placement.cpp) of the part of the workspace that must stay in L2: the rows x. Overwrites it.
double quire_segment_conflicts(bf16* workspace, long hidden, long at_once) {
  return cache_conflicts((char*)workspace, at_once * (hidden + kPad) * sizeof(bf16));
}

// Runs one layer on all rows, with what adapters add, as a segment does. x: [rows, k]; out: [rows, l->width()], bf16.
void quire_run_adapted(const Linear* l, const bf16* x, long ldx, bf16* out, long ldo, long rows, const LoraRows* lora,
                       long num_lora) {
  (l->gated ? run_gated : run_adapted)(*l, {lora, num_lora, 0, 0, rows}, x, ldx, out, ldo, rows);
}

// Runs one segment on all tokens. attended: [tokens, o_proj.k], row stride lda; the first segment does not read it.
// residual: [tokens, hidden], added to. out: [tokens, qkv.n], row stride cache.ld_qkv, with q rotated; k and v go to
// the cache and their columns of `out` are undefined. For the last segment, out is [tokens, hidden], the normed sum.
// All other tensors are contiguous. number: of the segment, for the adapters `lora` of the tokens.
void quire_run_segment(const Segment* s, const bf16* attended, long lda, bf16* residual, bf16* out,
                       const long* positions, const long* slots, long tokens, bf16* workspace, long number,
                       const LoraRows* lora, long num_lora) {
  const long ldo = s->qkv.k ? s->cache.ld_qkv : s->hidden, pieces = (tokens + s->at_once - 1) / s->at_once;
  const long each = pieces > 1 ? ((tokens + pieces - 1) / pieces + 31) / 32 * 32 : tokens;
  for (long t = 0; t < tokens; t += each) {
    const long rows = std::min(each, tokens - t);
    run_tokens(*s, attended + t * lda, lda, residual + t * s->hidden, out + t * ldo, positions + t, slots + t, rows,
               workspace, workspace + s->at_once * (s->hidden + kPad),
               {lora, num_lora, number * kNumAdapted, t, t + rows});
  }
}

// Runs all layers of a step. The arguments from seq_lens to path are those of quire_paged_attention.
// segments: num_layers + 1. residual: [tokens, hidden], added to.
// qkv [tokens, qkv.n], row stride cache.ld_qkv, and attended [tokens, o_proj.k], row stride lda: buffers.
// out: [num_wanted, hidden], for the tokens with the indices in `wanted` (ascending), or for all if `wanted` is null.
// lora: the adapters of the tokens; wanted_lora: those of the wanted tokens, by their places among these.
void quire_run_layers(const Segment* segments, long num_layers, bf16* residual, bf16* qkv, bf16* attended, long lda,
                      bf16* out, const long* positions, const CacheGroup* groups, long tokens, bf16* workspace,
                      const int* seq_lens, const int* query_start_loc, long num_requests, int path, const long* wanted,
                      long num_wanted, const LoraRows* lora, long num_lora, const LoraRows* wanted_lora,
                      long num_wanted_lora) {
  quire_run_segment(segments, nullptr, 0, residual, qkv, positions, groups[segments->group].slots, tokens, workspace, 0,
                    lora, num_lora);
  for (const Segment *s = segments + 1, *last = segments + num_layers; s <= last; s++) {
    const CacheGroup& group = groups[s[-1].group];
    const long ld = segments->cache.ld_qkv;
    if (s->mixer) quire_mix(s->mixer, &group.states, qkv, ld, attended, lda);
    else
      quire_paged_attention(s->attention, qkv, ld, attended, lda, group.block_table, group.ld_table, seq_lens,
                            query_start_loc, num_requests, path, s == last ? wanted : nullptr, num_wanted);
    if (s->gated) quire_sigmoid_gate(attended, lda, qkv + s->o_proj.k, ld, tokens, s->o_proj.k);
    if (s == last && wanted) {
      keep_rows(attended, lda, s->o_proj.k, wanted, num_wanted);
      keep_rows(residual, s->hidden, s->hidden, wanted, num_wanted);
      tokens = num_wanted, lora = wanted_lora, num_lora = num_wanted_lora;
    }
    quire_run_segment(s, attended, lda, residual, s < last ? qkv : out, positions, groups[s->group].slots, tokens,
                      workspace, s - segments, lora, num_lora);
  }
}
}
