// Kernels that other kernels call.
#pragma once

#include "compact.h"
#include "eight_bits.h"
#include "quant.h"
#include "simd.h"

struct QkvArgs {
  void* qkv;  // [T, (num_heads + 2 num_kv_heads) * head_dim]; q is written back here, normalised and rotated
  void* k_cache;
  void* v_cache;
  const void* q_weight;  // [head_dim] of the q norm, or null; float32 if wide
  const void* k_weight;
  const float* cos_sin;  // [positions, rotary_dim]: cosines, then sines; null: no rotation
  long ld_qkv, k_block, k_slot, k_head, v_block, v_slot, v_head;  // strides in elements
  long num_heads, num_kv_heads, head_dim, v_dim, rotary_dim, block_size, dtype, wide;
  float eps;
  long cache;  // a CacheType
  Scales k_scales, v_scales;
  long gap;  // columns between the queries and the keys
};

// Callback for output tiles that replaces `out`: called with some columns of some rows, in the thread that computed
// them, while they are hot in cache.
struct Sink {
  long columns;  // columns per call; a multiple of 32 that divides the number of columns
  void* context;
  void (*take)(void* context, const bf16* x, long ldx, long row, long rows, long column);
};

// A packed linear layer. k = 0: no layer.
struct Linear {
  const bf16* packed;
  const Quant* quant;      // replaces `packed` if not null
  const Compact* compact;  // likewise
  const float* bias;
  long n, k, gated, path;  // arguments of quire_gemm_run; gated: an `Activation` (gemm.h)
  const Linear* next;      // the columns after these, whose weights are of another kind; null: none

  long width() const { return gated ? n / 2 : n; }
};

// Rows [begin, end) of some x, and the layer that multiplies them.
struct LinearRows {
  const Linear* linear;
  long begin, end;
};

class LoraSums;

// Multiplies each of the rows by its layer; the layers have the same n, k and activation, and no `next`. out: bf16, or
// float32 with out_f32. lora: is added to the sums of a single product that `adds_lora`, from its block `block` on.
void run_products(const LinearRows* products, long count, const bf16* x, long ldx, void* out, long ldo, bool out_f32,
                  const LoraSums* lora = nullptr, long block = 0);
// Returns whether the product of `rows` rows can add a LoraSums.
bool adds_lora(const Linear& linear, long rows);

// The experts of a layer that are on this rank.
struct Experts {
  const Linear *gate_up, *down;  // [count]; without a gate, `gate_up` is up alone
  long first, count;             // ids first .. first + count - 1 are here, others on other ranks
  long top_k;
  long weigh_inputs;  // the weights multiply the experts' inputs instead of their outputs
  long squares;       // without a gate: relu(up)^2 is between the products
};

// How the experts of a token and their weights follow from its router logits (RoutingSpec in models/moe_spec.py).
struct Routing {
  enum Scores : long { kSoftmax, kSigmoid, kLogits };
  enum Weights : long { kScores, kNormalized, kSoftmaxOfChosen, kSigmoidOfChosen };
  const float* bias;        // [num_experts] of the logits; null: none
  const float* correction;  // [num_experts] added to the scores to choose; null: none
  long num_experts, top_k, scores, weights;
  float scale, epsilon;
};

double cache_conflicts(char* memory, long bytes);

extern "C" {
long quire_gemm_packed_columns(long n, int silu_mul);
void quire_gemm_run(const bf16* x, long ldx, const bf16* packed, const float* bias, void* out, long ldo, long m, long n,
                    long k, int flags, int path);
void quire_gemm_run_compact(const bf16* x, long ldx, const Compact* weight, const float* bias, void* out, long ldo,
                            long m, long n, long k, int flags, int path);
void quire_gemm_run_quant(const bf16* x, long ldx, const Quant* weight, const float* bias, void* out, long ldo, long m,
                          long n, long k, int flags, int path);
bool quire_gemm_run_to_sink(const bf16* x, long ldx, const bf16* packed, const Quant* quant, const Compact* compact,
                            const float* bias, const Sink* sink, long m, long n, long k, int path,
                            const LoraSums* lora);
void quire_add_rms_norm(const void* x, long ldx, void* residual, long ldr, const void* weight, void* out, long ldo,
                        long rows, long h, float eps, int dtype, int wide);
void quire_run_experts(const Experts* e, const bf16* x, long ldx, const int64_t* ids, const float* weights, bf16* out,
                       long ldo, long tokens);
struct LoraRows;
void quire_run_adapted_experts(const Experts* e, const bf16* x, long ldx, const int64_t* ids, const float* weights,
                               bf16* out, long ldo, long tokens, const LoraRows* gate_up, const LoraRows* down,
                               long count);
void quire_route(const Routing* r, const float* logits, float* weights, int64_t* ids, long tokens);
void quire_sigmoid_gate(bf16* x, long ldx, const bf16* gate, long ldg, long rows, long width);
void quire_qkv_to_cache(const QkvArgs* a, void* qkv, const long* positions, const long* slots, long num_tokens);
void quire_qkv_head_to_cache(const QkvArgs* a, long head, const bf16* x, long ldx, const long* positions,
                             const long* slots, long token, long count);
// Only attention knows the type of `layer`.
using Attend = void(const void* layer, const void* q, long ldq, void* out, long ldo, const int* block_table,
                    long ld_table, const int* seq_lens, const int* query_start_loc, long num_requests, int path,
                    const long* wanted, long num_wanted);
Attend quire_paged_attention, quire_attend_own, quire_attend_int8, quire_attend_e4m3;
}
