// Attention with vectors, of either width and for any dtype: blocked flash attention
// (https://arxiv.org/abs/2205.14135), 128 keys at a time.
//
// Rows (tokens x query heads of one KV head) are converted to floats in groups of up to kMostRows, stored k by k so
// that operands are contiguous in the order of use. Keys and values become tiles of floats, 32 of k by 32 columns; the
// columns of a key tile are keys, those of a value tile are elements. If there are enough rows to use them more than
// once, all tiles of the 128 keys are packed first and stay in L2. Otherwise each tile is used right after it is
// packed, in L1.
//
// With ONE_ORDER, every sum is in the order of k or of keys for any number of rows, and keys that a row does not see
// add zeros: a row's result depends on no other row.
#pragma once

#include "attention_fixed_tiles.h"
#include "attention_float_tiles.h"

namespace {

// Continues the online softmax of a row: replaces x, the products of its query with 16 V keys, with weights relative to
// the running maximum m, and updates m and the running sum. Keys outside [lo, hi) get weight 0. Returns the factor by
// which the earlier results must be multiplied.
template <int V>
inline float weigh(const Layer& l, float* x, long lo, long hi, float& m, float& sum) {
  const int first = int(std::min(lo, 16L * V)), last = int(std::max(hi, 0L));
  vf v[V], top = set1(kNegInf);
  auto masked = [&](int i) { return first > 16 * i || last < 16 * i + 16; };
  auto seen = [&](int i, float unseen) {
    return masked(i) ? select_range(v[i], first - 16 * i, last - 16 * i, set1(unseen)) : v[i];
  };
  for (int i = 0; i < V; i++) {
    v[i] = load(x + 16 * i);
    v[i] = l.soft_cap > 0 ? tanh(v[i] * set1(l.scale / l.soft_cap)) * set1(l.soft_cap * kLog2e)
                          : v[i] * set1(l.scale * kLog2e);
    v[i] = seen(i, kNegInf);
    top = max(top, v[i]);
  }
  const float before = m, now = std::max(before, reduce_max(top));
  if (std::isinf(now)) {  // -inf: no key so far; +inf: a product overflowed, so the result is NaN
    for (int i = 0; i < V; i++) store(x + 16 * i, zero());
    if (now < 0) return 1.f;
    m = now;
    return sum = std::numeric_limits<float>::quiet_NaN();
  }
  vf total = zero();
  for (int i = 0; i < V; i++) {
    v[i] = exp2(v[i] - set1(now));
    v[i] = seen(i, 0.f);
    store(x + 16 * i, v[i]);
    total = total + v[i];
  }
  const float correction = before == now ? 1.f : std::exp2(before - now);
  m = now;
  sum = sum * correction + reduce_add(total);
  return correction;
}

inline float weigh_steps(const Layer& l, int steps, float* x, long lo, long hi, float& m, float& sum) {
  static constexpr float (*kWeigh[])(const Layer&, float*, long, long, float&, float&) = {weigh<2>, weigh<4>, weigh<6>,
                                                                                          weigh<8>};
  return kWeigh[steps - 1](l, x, lo, hi, m, sum);
}

constexpr size_t state_bytes(long rows, long d) { return (rows * (padded(d) + 2) + 15) / 16 * 16 * sizeof(float); }

// Multiplies the first 32 * steps columns of x [rows][kKeys] by `by`.
inline void multiply_columns(float* x, int rows, int steps, const float* by) {
  for (int r = 0; r < rows; r++, x += kKeys)
    for (int c = 0; c < steps * 32; c += 16) store(x + c, load(x + c) * load(by + c));
}

// Runs a task of queries of type Q and a cache of type T. slots[token] is the slot of the token's partial result,
// unless the task has its own slot. following: the thread's next task, whose first keys are prefetched, or null if not
// known yet.
template <typename Q, typename T, typename Tiles>
void attend_rows(const Step& s, const Task& t, const Task* following, const Partials& partials, const long* slots,
                 char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim, dv = l.v_dim, ld = padded(dv);
  const int g = s.group(), rows = t.count * g;
  float *acc = (float*)memory, *m = acc + rows * ld, *sum = m + rows;
  Tiles tiles(memory + state_bytes(rows, dv), rows, d, dv, l.two_scales());
  auto token = [&](int r) { return t.tokens[r / g]; };
  auto partial = [&](long h, int r) { return partials.at(t.slot < 0 ? slots[token(r)] : t.slot, h * g + r % g); };
  const long first = t.begin / kKeys * kKeys;
  KeyBlock<T> blocks[2], *now = &blocks[0], *next = &blocks[1];
  next->locate(l, t.table, t.h0, first, t.begin, t.end);
  for (long h = t.h0; h < t.h1; h++) {
    for (int r = 0; r < rows; r++) {
      if (t.resume) {
        const Partial from = partial(h, r);
        std::copy(from.acc, from.acc + dv, acc + r * ld);
        m[r] = *from.m, sum[r] = reduce_add(load(from.l));
      } else {
        std::fill(acc + r * ld, acc + r * ld + ld, 0.f);
        m[r] = kNegInf, sum[r] = 0;
      }
    }
    tiles.queries([&](int r) { return (const Q*)s.q + token(r) * s.ldq + (h * g + r % g) * d; });
    for (long key = first; key < t.end; key += kKeys) {
      std::swap(now, next);
      if (key + kKeys < t.end) next->locate(l, t.table, h, key + kKeys, t.begin, t.end);
      else if (h + 1 < t.h1) next->locate(l, t.table, h + 1, first, t.begin, t.end);
      else if (following)
        next->locate(l, following->table, following->h0, following->begin / kKeys * kKeys, following->begin,
                     following->end);
      else next->end = 0;
      alignas(64) float k_scales[kKeys], v_scales[kKeys], rope_scales[kKeys];
      TwoScales two;
      if constexpr (kScaled<T>) {
        now->scales(l, l.k_scales, k_scales), now->scales(l, l.v_scales, v_scales);
        if (l.two_scales()) now->scales(l, l.rope_scales, rope_scales), two = {k_scales, rope_scales};
      }
      tiles.keys(*now, int(std::min((t.end - key + 31) / 32, kKeys / 32L)), *next, two);
      for (int i = 0; i < tiles.groups(); i++) {
        const int row0 = tiles.begin(i), size = tiles.size(i);
        alignas(64) float x[kMostRows * kKeys];
        // A task's tokens ascend, or all of them see all its keys.
        const long seen = std::min(t.end, s.position[token(row0 + size - 1)] + 1) - key;
        if (seen <= 0) continue;
        const int steps = int(std::min((seen + 31) / 32, kKeys / 32L));
        std::fill(x, x + size * kKeys, 0.f);
        tiles.score(i, steps, x);
        if constexpr (kScaled<T>)
          if (!two.first) multiply_columns(x, size, steps, k_scales);
        for (int r = 0; r < size; r++) {
          const long position = s.position[token(row0 + r)];
          const float correction =
              weigh_steps(l, steps, x + r * kKeys, std::max(t.begin, s.first_key(position)) - key,
                          std::min(t.end, position + 1) - key, m[row0 + r], sum[row0 + r]);
          if (correction == 1.f) continue;
          float* values = acc + (row0 + r) * ld;
          for (long c = 0; c < dv; c += 16) store(values + c, load(values + c) * set1(correction));
        }
        if constexpr (kScaled<T>) multiply_columns(x, size, steps, v_scales);
        tiles.add(i, steps, x, acc + row0 * ld);
      }
    }
    for (int r = 0; r < rows; r++) {
      const float* values = acc + r * ld;
      if (!t.keep) {
        write_row((Q*)s.out + token(r) * s.ldo + (h * g + r % g) * dv, values, l.with_sink(h * g + r % g, m[r], sum[r]),
                  dv);
        continue;
      }
      const Partial to = partial(h, r);
      std::copy(values, values + dv, to.acc);
      store(to.l, zero());
      *to.l = sum[r], *to.m = m[r];
    }
  }
}

}  // namespace
