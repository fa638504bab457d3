// y[m, n] = x[m, k] W[n, k]^T (+ bias): bf16 inputs, fp32 accumulation, a weight that is packed once.
//
// Packed weight: blocks of 32 output columns; a block is a sequence of k-steps of 32; a k-step is two tiles of 16
// columns; a tile is 16 rows of 16 columns x 2 consecutive k, the layout of AMX's right operand and of `vdpbf16ps`:
//     packed[n / 32][k / 32][n / 16 % 2][k / 2 % 16][n % 16][k % 2]
// n and k are padded with zeros to multiples of 32. Every kernel reads the weight once, front to back. The same layout
// serves one row and thousands.
//
// If its exponents allow, the weight is stored in three quarters of the bytes (compact.h); its k-steps are then
// expanded into a buffer in L1.
//
// Quantized weights have their own layout (quant.h). Their products use integer rows; more than 32 rows use bf16 with
// AMX, and many rows use fixed point without AMX, for which a stretch of the weight is expanded in cache, in the layout
// above.
#include <cassert>
#include <vector>

#include "gemm_vector.h"
#include "gemm_fixed.h"
#include "gemm_few.h"
#include "gemm_many.h"
#include "quant_pack.h"

namespace {

// Returns whether the product takes the many-rows path. path: as in quire_gemm_run and quire_gemm_run_quant.
bool by_many_rows(const Gemm& g, int path) {
#if QUIRE_AMX
  if (!amx_permitted()) return false;
  if (!g.quant) return path != 1 && g.m > 32;
  return path == 3 || (path == 0 && g.m > (g.quant->group < 64 ? kMaxQuantRows / 2 : kMaxQuantRows));
#else
  return false;
#endif
}

// Whether the product takes the path of fixed-point numbers.
bool by_fixed(const Gemm& g, int path) {
  if (g.quant && g.quant->narrow) return false;  // the same rounding for any number of rows
  if (g.quant)
    return path == 3 || (path == 0 && g.m >= (g.quant->kind == kFloats8 ? kFixedFloatRows : kFixedQuantRows));
  return path == 0 && g.compact && g.m >= (g.out_f32 == 1 ? kFixedLogitRows : kFixedRows);
}

// Multiplies with AMX, if it is there and the path permits it; returns whether it did.
bool run_amx(const Gemm& g, int path, int threads) {
#if QUIRE_AMX
  if (!amx_permitted()) return false;
  if (by_many_rows(g, path)) return run_many_rows(g, threads), true;
  const bool bytes = g.quant && has_table_of_halves(g.quant->kind);
  if (g.quant ? bytes && (path == 2 || (path == 0 && g.m > 4)) : path != 1)
    return g.quant ? run_quant_rows(g, threads) : run_few_rows(g, threads), true;
#endif
  return false;
}

// Runs products of the same n, k and kind of weight, as path says (see quire_gemm_run and quire_gemm_run_quant).
void run_all(const std::vector<Gemm>& products, int path) {
  const int threads = Pool::get().threads();
  std::vector<Gemm> fixed, vector;
  for (const Gemm& g : products)
    if (!run_amx(g, path, threads)) (by_fixed(g, path) ? fixed : vector).push_back(g);
  if (!fixed.empty()) run_fixed(fixed, threads);
  if (vector.empty()) return;
  if (!vector[0].quant) run_vector(vector, threads);
  else if (vector[0].quant->kind == kFloats8) run_e4m3(vector, threads);
  else run_quant_vector(vector, threads);
}

}  // namespace

bool adds_lora(const Linear& l, long rows) {
#if QUIRE_AMX
  if (!l.quant) return l.path != 1 && amx_permitted();  // for any number of rows: the same order of sums
#endif
  const Gemm g{nullptr, 0, nullptr, nullptr, nullptr, 0, int(rows), int(l.n), int(l.k), 0, 0, l.quant};
  return l.path == 0 && by_many_rows(g, 0);
}

void run_products(const LinearRows* products, long count, const bf16* x, long ldx, void* out, long ldo, bool out_f32,
                  const LoraSums* lora, long block) {
  std::vector<Gemm> all;
  for (long i = 0; i < count; i++) {
    const auto& [linear, begin, end] = products[i];
    void* to = (char*)out + begin * ldo * (out_f32 ? 4 : 2);
    all.push_back({x + begin * ldx, ldx, linear->packed, linear->bias, to, ldo, int(end - begin), int(linear->n),
                   int(linear->k), out_f32 ? 2 : 0, int(linear->gated), linear->quant, linear->compact, nullptr, lora,
                   block});
  }
  run_all(all, int(products[0].linear->path));
}

extern "C" {

// Sets the number of threads that all kernels use from now on, including the caller's.
void quire_set_threads(int n) { Pool::get().set_threads(n); }

// Returns the number of columns of the packed weight: n rounded up to whole blocks (of each half, with silu_mul).
long quire_gemm_packed_columns(long n, int silu_mul) { return silu_mul ? (n / 2 + 15) / 16 * 32 : (n + 31) / 32 * 32; }

// Packs block nb of weight [n, k] with row stride ldw to [ceil(k / 32)][2][16][16][2]. The padding is 0, or, with
// `repeat`, copies of other weights: those are multiplied only by zeros or produce outputs that are not read.
static void pack_block(const bf16* weight, long ldw, bf16* packed, long nb, long n, long k, int silu_mul, bool repeat) {
  const long steps = (k + kStep - 1) / kStep;
  for (long t = 0; t < 2; t++) {
    const bf16* rows[16];
    for (int c = 0; c < 16; c++) {
      long j = source_column(nb * 32 + t * 16 + c, n, silu_mul);
      rows[c] = j >= 0 ? weight + j * ldw : repeat ? weight : nullptr;
    }
    for (long s = 0; s < steps; s++) {
      uint32_t* dst = (uint32_t*)(packed + s * kStepElems + t * (kStepElems / 2));
#if defined(__AVX512F__)
      if ((s + 1) * kStep <= k) {
        __m512i r[16];
        for (int c = 0; c < 16; c++) r[c] = rows[c] ? _mm512_loadu_si512(rows[c] + s * kStep) : _mm512_setzero_si512();
        transpose_16x16(r);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(dst + i * 16, r[i]);
        continue;
      }
#endif
      auto at = [&](int c, long kk) -> uint32_t {
        return rows[c] && (kk < k || repeat) ? rows[c][kk < k ? kk : 0].bits : 0;
      };
      for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) dst[r * 16 + c] = at(c, s * kStep + 2 * r) | at(c, s * kStep + 2 * r + 1) << 16;
    }
  }
}

// Packs weight [n, k] with row stride ldw to packed [columns / 32][ceil(k / 32)][2][16][16][2].
void quire_gemm_pack(const bf16* weight, long ldw, bf16* packed, long n, long k, int silu_mul) {
  const long steps = (k + kStep - 1) / kStep, blocks = quire_gemm_packed_columns(n, silu_mul) / kCols;
  parallel_for(blocks, 4,
               [&](long nb) { pack_block(weight, ldw, packed + nb * steps * kStepElems, nb, n, k, silu_mul, false); });
}

// Packs the weight to 12 bits: data [columns / 32][ceil(k / 32)][768], exceptions [most + 1], first and scales [columns
// / 32], units [columns / 32][ceil(k / 256)][32]. Returns the number of exceptions without the end marker, or -1 if
// there are more than `most` or a weight cannot be stored this way.
long quire_gemm_compact(const bf16* weight, long ldw, uint16_t* data, uint64_t* exceptions, uint32_t* first,
                        float* scales, uint8_t* units, long n, long k, int silu_mul, long most) {
  const long steps = (k + kStep - 1) / kStep, blocks = quire_gemm_packed_columns(n, silu_mul) / kCols,
             room = steps * kStepElems;
  std::vector<std::vector<uint64_t>> found(blocks);
  std::atomic<long> left{most};
  parallel_for(blocks, 4, [&](long nb) {
    if (left < 0) return;
    bf16* packed = (bf16*)own_scratch.get(room * (sizeof(bf16) + sizeof(uint64_t)));
    uint64_t* own = (uint64_t*)(packed + room);
    pack_block(weight, ldw, packed, nb, n, k, silu_mul, true);
    const long count =
        compact_block(packed, int(steps), nb * steps, data + nb * steps * Compact::kStepWords, own, scales + nb);
#if !QUIRE_AMX
    if (count >= 0) find_units(packed, k, std::ilogb(scales[nb]), units + nb * runs_of(steps) * kCols);
#endif
    if (count > 0) found[nb].assign(own, own + count);
    left -= count < 0 ? most + 1 : count;
  });
  if (left < 0) return -1;
  long total = 0;
  for (long nb = 0; nb < blocks; total += long(found[nb++].size())) {
    first[nb] = uint32_t(total);
    std::copy(found[nb].begin(), found[nb].end(), exceptions + total);
  }
  exceptions[total] = ~uint64_t(0);
  return total;
}

// out[i, :k] = row ids[i] of the weight that was packed to `packed` (without silu_mul); for an embedding that shares
// the packed LM head.
void quire_gemm_unpack_rows(const bf16* packed, const long* ids, long num_ids, bf16* out, long ldo, long k) {
  const long steps = (k + kStep - 1) / kStep;
  parallel_for(num_ids, 4, [&](long i) {
    const bf16* col = packed + ids[i] / 32 * steps * kStepElems + ids[i] / 16 % 2 * (kStepElems / 2) + ids[i] % 16 * 2;
    for (long kk = 0; kk < k; kk++) out[i * ldo + kk] = col[kk / kStep * kStepElems + kk % kStep / 2 * 32 + kk % 2];
  });
}

// Like quire_gemm_unpack_rows, for a compact weight.
void quire_compact_rows(const Compact* w, const long* ids, long num_ids, bf16* out, long ldo, long k) {
  parallel_for(num_ids, 4, [&](long i) {
    const int nb = int(ids[i] / 32), v0 = int(ids[i] / 16 % 2) * 16, pair = int(ids[i] % 16);
    bf16* row = out + i * ldo;
    const uint64_t* e = w->exceptions_from(nb, 0);
    for (int s = 0; s < w->k_steps; s++) {
      uint32_t values[16];
      for (int r = 0; r < 16; r++) values[r] = expand_pair(w->step(nb, s), v0 + r, pair);
      for (const uint64_t step = uint64_t(nb) * w->k_steps + s; *e >> 32 == step; e++) {
        const int place = int(*e >> 16 & 1023) - v0 * 32;
        if (place >= 0 && place < 512 && place / 2 % 16 == pair)
          memcpy((uint16_t*)(values + place / 32) + place % 2, e, 2);
      }
      const vf scale = set1(w->scales[nb]);  // exact: a power of two
      bf16 step_values[32];
      for (int half = 0; half < 2; half++)
        store(step_values + half * 16, load((const bf16*)values + half * 16) * scale);
      memcpy(row + s * kStep, step_values, std::min(long(kStep), k - s * kStep) * 2);
    }
  });
}

// y = x W^T (+ bias). bias: fp32, in packed order, padded to the packed columns. out: bf16, or float32 with flag 1; the
// other flags are twice the `Activation`. path: 0 automatic, 1 vector, 2 AMX, 3 automatic, but the same path for any
// number of rows.
void quire_gemm_run(const bf16* x, long ldx, const bf16* packed, const float* bias, void* out, long ldo, long m, long n,
                    long k, int flags, int path) {
  run_all({{x, ldx, packed, bias, out, ldo, int(m), int(n), int(k), flags & 1, flags >> 1}}, path);
}

// Like quire_gemm_run, for a compact weight.
void quire_gemm_run_compact(const bf16* x, long ldx, const Compact* weight, const float* bias, void* out, long ldo,
                            long m, long n, long k, int flags, int path) {
  run_all({{x, ldx, nullptr, bias, out, ldo, int(m), int(n), int(k), flags & 1, flags >> 1, nullptr, weight}}, path);
}

// Like quire_gemm_run, for a weight of 4 or 8 bits. path: 0 automatic, 1 integers without AMX, 2 integers with AMX, 3
// the many-rows path: bf16 with AMX, else fixed point.
void quire_gemm_run_quant(const bf16* x, long ldx, const Quant* weight, const float* bias, void* out, long ldo, long m,
                          long n, long k, int flags, int path) {
  run_all({{x, ldx, nullptr, bias, out, ldo, int(m), int(n), int(k), flags & 1, flags >> 1, weight}}, path);
}

// Like the functions above, for whichever weight is not null, but passes the result to `sink`. Returns false and does
// nothing if the rows are few, there is no AMX, or the sink takes so many columns at a time that threads would be idle.
bool quire_gemm_run_to_sink(const bf16* x, long ldx, const bf16* packed, const Quant* quant, const Compact* compact,
                            const float* bias, const Sink* sink, long m, long n, long k, int path,
                            const LoraSums* lora) {
  Gemm g{x, ldx,   packed,  bias, nullptr, sink->columns + kCols, int(m), int(n), int(k), 0,
         0, quant, compact, sink, lora};
  const int threads = Pool::get().threads();
  if (!by_many_rows(g, path) || n / sink->columns < 2 * threads) return false;
#if QUIRE_AMX
  run_many_rows(g, threads);
#endif
  return true;
}

// Quantizes weight [n, k] (bf16) into `data` and `scales`; no offsets. group: a multiple of 32.
void quire_quantize(const bf16* weight, long ldw, uint8_t* data, bf16* scales, long n, long k, int bits, long group,
                    int silu_mul) {
  const long steps = (k + 63) / 64, groups = (steps * 64 + group - 1) / group,
             columns = quire_gemm_packed_columns(n, silu_mul);
  parallel_for(columns / 16, 2, [&](long tile) {
    const long ld = steps * 64;
    float* w = (float*)own_scratch.get(ld * 20);
    int8_t* q = (int8_t*)(w + ld);
    const uint8_t zero_point = bits == 8 ? 128 : 8;
    for (int c = 0; c < 16; c++) {
      const long source = source_column(tile * 16 + c, n, silu_mul), given = source < 0 ? 0 : k;
      long i = 0;
      for (; i + 16 <= given; i += 16) store(w + i, load(weight + source * ldw + i));
      for (; i < ld; i++) w[i] = i < given ? to_float(weight[source * ldw + i]) : 0.f;
      for (long at = 0, begin = 0; begin < ld; at++, begin += group)
        scales[(tile / 2 * groups + at) * kCols + tile % 2 * 16 + c] =
            to_bf16(quantize_group(w + begin, int(std::min(group, ld - begin)), bits, q + c * ld + begin));
    }
    for (long i = 0; i < ld * 16; i++) q[i] = int8_t(q[i] + zero_point);
    pack_columns(data, bits, int(steps), tile / 2, int(tile % 2), (const uint8_t*)q);
  });
}

// Packs a weight that is already quantized into q, kIntegers4, kIntegers8 or kFloats8: values [n, k] signed (-8 .. 7
// for 4 bits), scale and offset [n, ceil(k / group)] float32; offset may be null.
void quire_pack_quantized(const int8_t* values, const float* scale, const float* offset, const Quant* q, long n, long k,
                          int silu_mul) {
  const long groups = q->groups, columns = quire_gemm_packed_columns(n, silu_mul);
  const long given = (k + q->group - 1) / q->group;  // number of groups in the source
  parallel_for(columns / 16, 2, [&](long tile) {
    const long ld = long(q->k_steps) * 64;
    int8_t* rows = (int8_t*)own_scratch.get(ld * 16);
    memset(rows, 0, ld * 16);
    for (int c = 0; c < 16; c++) {
      const long source = source_column(tile * 16 + c, n, silu_mul),
                 place = tile / 2 * groups * kCols + tile % 2 * 16 + c;
      if (source >= 0) memcpy(rows + c * ld, values + source * k, k);
      for (long i = 0; i < groups; i++) {
        const bool real = source >= 0 && i < given;
        q->put(q->scales, place + i * kCols, real ? scale[source * given + i] : 0.f);
        if (offset) q->put(q->offsets, place + i * kCols, real ? offset[source * given + i] : 0.f);
      }
    }
    for (long i = 0; i < ld * 16; i++) rows[i] = int8_t(rows[i] + q->zero_point());
    pack_columns((uint8_t*)q->data, q->bits(), q->k_steps, tile / 2, int(tile % 2), (const uint8_t*)rows);
  });
}

// out[i, :k] = row ids[i] of the weight, in bf16; for an embedding that shares the packed LM head.
void quire_quant_rows(const Quant* q, const long* ids, long num_ids, bf16* out, long ldo, long k) {
  parallel_for(num_ids, 4, [&](long i) {
    for_row(*q, ids[i], int(k), [&](int kk, float value) { out[i * ldo + kk] = to_bf16(value); });
  });
}
}
