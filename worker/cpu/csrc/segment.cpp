// All that a decoder computes between the attention of one layer and that of the next, as one call, and all its layers as one: behind a gigabyte of weights the code
// that would make these calls from Python has left the caches. The activations of a piece of the tokens are used again while they are in cache, in memory that
// is not new to the process each time.
#include <algorithm>

#include "kernels.h"

namespace {

constexpr long kBf16 = 1;       // the `dtype` of other kernels
constexpr long kTokens = 1024;  // at a time: a product takes 512 rows per pass over its weight, so that each of two threads has rows of its own from start to end
constexpr long kPad = 32;       // between rows of the workspace: rows whose distance is a multiple of 4 KiB would share a few lines of the caches

struct Linear {  // k = 0: there is none
  const bf16* packed;
  const Quant* quant;  // instead of `packed`, as is:
  const Compact* compact;
  const float* bias;
  long n, k, silu_mul, path;  // as quire_gemm_run takes them

  long width() const { return silu_mul ? n / 2 : n; }
  void run(const bf16* x, long ldx, bf16* out, long ldo, long rows) const {
    const int flags = int(silu_mul) << 1;
    if (quant) quire_gemm_run_quant(x, ldx, quant, bias, out, ldo, rows, n, k, flags, int(path));
    else if (compact) quire_gemm_run_compact(x, ldx, compact, bias, out, ldo, rows, n, k, flags, int(path));
    else quire_gemm_run(x, ldx, packed, bias, out, ldo, rows, n, k, flags, int(path));
  }
};

// o_proj, the MLP, then the projections of the next layer. At the start there are only these; at the end only what is before, and a norm.
struct Segment {
  Linear o_proj, gate_up, down, qkv;
  const bf16 *mlp_norm, *norm;  // before the MLP; before qkv, or at the end
  QkvArgs cache;                // of the next layer
  const void* attention;        // of the layer before, as quire_paged_attention takes it
  long hidden;
  float eps;
};

void add_norm(const Segment& s, const bf16* x, long ldx, bf16* residual, const bf16* weight, bf16* out, long ldo, long rows) {
  quire_add_rms_norm(x, ldx, residual, s.hidden, weight, out, ldo, rows, s.hidden, s.eps, kBf16);
}

// The projections, each head normalised, rotated and put where it belongs as soon as there are enough of its rows. False where the products do not come head by head.
bool qkv_to_cache(const Segment& s, const bf16* x, long ldx, bf16* out, const long* positions, const long* slots, long rows) {
  if (s.cache.head_dim % 32 != 0 || s.cache.dtype != kBf16) return false;
  struct Heads { QkvArgs args; const long *positions, *slots; } heads{s.cache, positions, slots};
  heads.args.qkv = out;
  const Sink sink{s.cache.head_dim, &heads, [](void* context, const bf16* x, long ldx, long row, long rows, long column) {
                    const Heads& h = *(const Heads*)context;
                    quire_qkv_head_to_cache(&h.args, column / h.args.head_dim, x, ldx, h.positions, h.slots, row, rows);
                  }};
  return quire_gemm_run_to_sink(x, ldx, s.qkv.packed, s.qkv.quant, s.qkv.compact, s.qkv.bias, &sink, rows, s.qkv.n, s.qkv.k, int(s.qkv.path));
}

// x, inner: workspace, rows of hidden + kPad and of the MLP's width + kPad.
void run_tokens(const Segment& s, const bf16* attended, long lda, bf16* residual, bf16* out, const long* positions, const long* slots, long rows, bf16* x, bf16* inner) {
  const long ldx = s.hidden + kPad, ldi = s.gate_up.width() + kPad;
  bf16* normed = s.qkv.k ? x : out;
  const long ldn = s.qkv.k ? ldx : s.hidden;
  if (s.o_proj.k) {
    s.o_proj.run(attended, lda, x, ldx, rows);
    add_norm(s, x, ldx, residual, s.mlp_norm, x, ldx, rows);
    s.gate_up.run(x, ldx, inner, ldi, rows);
    s.down.run(inner, ldi, x, ldx, rows);
    add_norm(s, x, ldx, residual, s.norm, normed, ldn, rows);
  } else {
    add_norm(s, residual, s.hidden, nullptr, s.norm, normed, ldn, rows);
  }
  if (!s.qkv.k || qkv_to_cache(s, x, ldx, out, positions, slots, rows)) return;
  s.qkv.run(x, ldx, out, s.cache.ld_qkv, rows);
  quire_qkv_to_cache(&s.cache, out, positions, slots, rows);
}

// Moves the rows in `wanted`, which ascends, to the front.
void keep_rows(bf16* x, long ldx, long width, const long* wanted, long num_wanted) {
  for (long i = 0; i < num_wanted; i++) memmove(x + i * ldx, x + wanted[i] * ldx, width * sizeof(bf16));
}

}  // namespace

extern "C" {

// Elements of bf16 that quire_run_segment wants as `workspace`.
long quire_segment_workspace(long hidden, long inner) { return kTokens * (hidden + inner + 2 * kPad); }

// How badly such a workspace is placed for the rows in it that are to stay in L2: x. Overwrites it (see placement.cpp).
double quire_segment_conflicts(bf16* workspace, long hidden) { return cache_conflicts((char*)workspace, kTokens * (hidden + kPad) * sizeof(bf16)); }

// attended [tokens, o_proj.k] in rows of lda, not read at the start. residual [tokens, hidden] is added to. out: [tokens, qkv.n] in rows of cache.ld_qkv, its q rotated;
// k and v are in the cache, and what is in their place here nobody may read; at the end [tokens, hidden], the normed sum. All others contiguous.
void quire_run_segment(const Segment* s, const bf16* attended, long lda, bf16* residual, bf16* out, const long* positions, const long* slots, long tokens, bf16* workspace) {
  const long ldo = s->qkv.k ? s->cache.ld_qkv : s->hidden, pieces = (tokens + kTokens - 1) / kTokens;
  const long each = pieces > 1 ? ((tokens + pieces - 1) / pieces + 31) / 32 * 32 : tokens;
  for (long t = 0; t < tokens; t += each)
    run_tokens(*s, attended + t * lda, lda, residual + t * s->hidden, out + t * ldo, positions + t, slots + t, std::min(each, tokens - t), workspace,
               workspace + kTokens * (s->hidden + kPad));
}

// All layers, for a step whose attention is quire_paged_attention with the arguments from block_table to path. segments: one more than there are layers. residual
// [tokens, hidden] is added to; qkv [tokens, qkv.n], in rows of cache.ld_qkv, and attended [tokens, o_proj.k], in rows of lda, are room for what is in between;
// out [num_wanted, hidden]: of the tokens whose indices `wanted` lists, ascending, or of all if it is null.
void quire_run_layers(const Segment* segments, long num_layers, bf16* residual, bf16* qkv, bf16* attended, long lda, bf16* out, const long* positions, const long* slots,
                      long tokens, bf16* workspace, const int* block_table, long ld_table, const int* seq_lens, const int* query_start_loc, long num_requests, int path,
                      const long* wanted, long num_wanted) {
  quire_run_segment(segments, nullptr, 0, residual, qkv, positions, slots, tokens, workspace);
  for (const Segment *s = segments + 1, *last = segments + num_layers; s <= last; s++) {
    quire_paged_attention(s->attention, qkv, segments->cache.ld_qkv, attended, lda, block_table, ld_table, seq_lens, query_start_loc, num_requests, path, s == last ? wanted : nullptr,
                          num_wanted);
    if (s == last && wanted) {
      keep_rows(attended, lda, s->o_proj.k, wanted, num_wanted);
      keep_rows(residual, s->hidden, s->hidden, wanted, num_wanted);
      tokens = num_wanted;
    }
    quire_run_segment(s, attended, lda, residual, s < last ? qkv : out, positions, slots, tokens, workspace);
  }
}
}
