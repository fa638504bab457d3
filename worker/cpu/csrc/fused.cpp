// Element-wise kernels between matmuls, each fused into one pass: residual + RMS norm; q/k norm + rotary embedding + KV
// cache write; SiLU * up. Arithmetic is float32 and rounds at the same points as the plain torch layers: a normalised
// value before its scaling by the weight, unless the weight is wider than the values, and every result.
#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr long kMinParallel = 1 << 15;  // elements; for fewer, waking other threads costs more than it saves

template <typename F>
void parallel_rows(long rows, long elements, F&& f) {
  parallel_for(rows, elements < kMinParallel ? rows : std::max(1L, rows / (4L * Pool::get().threads())), f);
}

// Normalised values of type T as they are multiplied by a weight of type W: a wider one takes them unrounded.
template <typename T, typename W>
vf unweighted(vf normed) {
  return std::is_same_v<T, W> ? rounded<T>(normed) : normed;
}
template <typename T, typename W>
T weighted(float normed, W weight) {
  T result;
  if (std::is_same_v<T, W>) store_scalar(&result, normed), normed = to_float(result);
  store_scalar(&result, normed * to_float(weight));
  return result;
}

template <typename T, typename W>
void add_rms_norm_row(const T* x, T* residual, const W* weight, T* out, long h, float eps) {
  vf sum = zero();
  float tail = 0;
  long i = 0;
  for (; i + 16 <= h; i += 16) {
    vf v = load(x + i);
    if (residual) {
      v = v + load(residual + i);
      store(residual + i, v);
      v = rounded<T>(v);  // the value stored in residual
    }
    sum = fma(v, v, sum);
  }
  for (; i < h; i++) {
    float v = to_float(x[i]);
    if (residual) {
      store_scalar(residual + i, v + to_float(residual[i]));
      v = to_float(residual[i]);
    }
    tail += v * v;
  }
  const float scale = 1.f / std::sqrt((reduce_add(sum) + tail) / float(h) + eps);
  const T* src = residual ? residual : x;
  for (i = 0; i + 16 <= h; i += 16) store(out + i, unweighted<T, W>(load(src + i) * set1(scale)) * load(weight + i));
  for (; i < h; i++) out[i] = weighted<T>(to_float(src[i]) * scale, weight[i]);
}

template <typename T>
void silu_and_mul_row(const T* x, T* out, long width) {
  long i = 0;
  for (; i + 16 <= width; i += 16) store(out + i, silu(load(x + i)) * load(x + width + i));
  for (; i < width; i++) {
    float v = to_float(x[i]);
    store_scalar(out + i, v / (1.f + std::exp(-v)) * to_float(x[width + i]));
  }
}

constexpr long kMaxHeadDim = 512;

template <typename T>
struct Head {  // a token's head: read from src, written to dst
  const T* src;
  T* dst;
  const float* cos_sin;  // for the token's position; null: no rotation
};

// Prefetches `count` elements for writing. They are not contiguous with the previous token's, and stores wait for their
// cache lines in order.
template <typename T>
void fetch_to_write(T* p, long count) {
  for (long i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 1);
}

// Normalises and rotates `count` heads of 16 N entries (at(i) is the i-th) with rotary_dim = head_dim; a head stays in
// registers. Computes the norms of 16 heads at a time, so that the latency of the square root is paid once for all.
template <int N, typename T, typename W, typename At>
void norm_rope_in_registers(long count, const W* weight, float eps, At&& at) {
  constexpr int HALF = N / 2, AT_ONCE = 16;
  vf w[N];
  for (int i = 0; i < N; i++) w[i] = weight ? load(weight + 16 * i) : zero();
  alignas(64) float scale[AT_ONCE] = {};
  for (long first = 0; first < count; first += AT_ONCE) {
    const int n = int(std::min(long(AT_ONCE), count - first));
    for (int h = 0; h < n; h++) fetch_to_write(at(first + h).dst, 16 * N);
    if (weight) {
      for (int h = 0; h < n; h++) {
        const T* src = at(first + h).src;
        vf sum = zero();
        for (int i = 0; i < N; i++) {
          const vf x = load(src + 16 * i);
          sum = fma(x, x, sum);
        }
        scale[h] = reduce_add(sum);
      }
      store(scale, set1(1.f) / root(load(scale) / set1(float(16 * N)) + set1(eps)));
    }
    for (int h = 0; h < n; h++) {
      const Head<T> head = at(first + h);
      vf v[N];
      for (int i = 0; i < N; i++) v[i] = load(head.src + 16 * i);
      if (weight)
        for (int i = 0; i < N; i++) v[i] = rounded<T>(unweighted<T, W>(v[i] * set1(scale[h])) * w[i]);
      for (int i = 0; i < HALF; i++) {
        const vf c = load(head.cos_sin + 16 * i), s = load(head.cos_sin + 16 * (i + HALF));
        store(head.dst + 16 * i, v[i] * c - v[i + HALF] * s);
        store(head.dst + 16 * (i + HALF), fma(v[i + HALF], c, v[i] * s));
      }
    }
  }
}

template <typename T, typename W>
void norm_rope(const T* src, T* dst, const W* weight, const float* cos_sin, const QkvArgs& a) {
  const long d = a.head_dim, half = a.rotary_dim / 2;
  alignas(64) float v[kMaxHeadDim + 16];
  long i = 0;
  vf sum = zero();
  for (; i + 16 <= d; i += 16) {
    vf x = load(src + i);
    sum = fma(x, x, sum);
    store(v + i, x);
  }
  float tail = 0;
  for (; i < d; i++) v[i] = to_float(src[i]), tail += v[i] * v[i];
  if (weight) {
    const float scale = 1.f / std::sqrt((reduce_add(sum) + tail) / float(d) + a.eps);
    for (i = 0; i + 16 <= d; i += 16)
      store(v + i, rounded<T>(unweighted<T, W>(load(v + i) * set1(scale)) * load(weight + i)));
    for (; i < d; i++) v[i] = to_float(weighted<T>(v[i] * scale, weight[i]));
  }
  if (cos_sin) {  // rotate pairs (i, i + half)
    for (i = 0; i + 16 <= half; i += 16) {
      vf x = load(v + i), y = load(v + half + i), c = load(cos_sin + i), s = load(cos_sin + half + i);
      store(v + i, x * c - y * s);
      store(v + half + i, fma(y, c, x * s));
    }
    for (; i < half; i++) {
      float x = v[i], y = v[half + i], c = cos_sin[i], s = cos_sin[half + i];
      v[i] = x * c - y * s;
      v[half + i] = y * c + x * s;
    }
  }
  for (i = 0; i + 16 <= d; i += 16) store(dst + i, load(v + i));
  for (; i < d; i++) store_scalar(dst + i, v[i]);
}

template <typename T, typename W, typename At>
void norm_rope_heads(long count, const W* weight, const QkvArgs& a, At&& at) {
  const bool whole = a.cos_sin && a.rotary_dim == a.head_dim;
  if (whole && a.head_dim == 128) return norm_rope_in_registers<8, T>(count, weight, a.eps, at);
  if (whole && a.head_dim == 64) return norm_rope_in_registers<4, T>(count, weight, a.eps, at);
  for (long i = 0; i < count; i++) {
    const Head<T> head = at(i);
    norm_rope(head.src, head.dst, weight, head.cos_sin, a);
  }
}

// Does the same with a weight of the type that `a` says.
template <typename T, typename At>
void norm_rope_heads(long count, const void* weight, const QkvArgs& a, At&& at) {
  if (a.wide) return norm_rope_heads<T>(count, (const float*)weight, a, at);
  norm_rope_heads<T>(count, (const T*)weight, a, at);
}

const float* angles(const QkvArgs& a, long position) {
  return a.cos_sin ? a.cos_sin + position * a.rotary_dim : nullptr;
}
template <typename C>
C* key_place(const QkvArgs& a, long slot) {
  return (C*)a.k_cache + slot / a.block_size * a.k_block + slot % a.block_size * a.k_slot;
}
template <typename C>
C* value_place(const QkvArgs& a, long slot) {
  return (C*)a.v_cache + slot / a.block_size * a.v_block + slot % a.block_size * a.v_slot;
}

// Stores the key or the value x of KV head h in 8 bits.
template <typename T, typename C>
void store_key(const QkvArgs& a, const T* x, long slot, long h) {
  store_head(x, a.head_dim, key_place<C>(a, slot) + h * a.k_head,
             a.k_scales.at(slot / a.block_size, slot % a.block_size, h), a.k_scales.constant());
}
template <typename T, typename C>
void store_value(const QkvArgs& a, const T* x, long slot, long h) {
  store_head(x, a.v_dim, value_place<C>(a, slot) + h * a.v_head,
             a.v_scales.at(slot / a.block_size, slot % a.block_size, h), a.v_scales.constant());
}

// Normalises and rotates `count` keys, from(i) says where they are, and passes each to keep(i, key).
template <typename T, typename From, typename Keep>
void rotated_keys(const QkvArgs& a, long count, From&& from, Keep&& keep) {
  constexpr long AT_ONCE = 16;
  alignas(64) T keys[AT_ONCE * kMaxHeadDim];
  for (long first = 0; first < count; first += AT_ONCE) {
    const long n = std::min(AT_ONCE, count - first);
    norm_rope_heads<T>(n, a.k_weight, a, [&](long i) {
      Head<T> head = from(first + i);
      head.dst = keys + i * a.head_dim;
      return head;
    });
    for (long i = 0; i < n; i++) keep(first + i, keys + i * a.head_dim);
  }
}

template <typename T, typename C>
void qkv_token(const QkvArgs& a, long t, long position, long slot) {
  const long d = a.head_dim, hq = a.num_heads, hk = a.num_kv_heads;
  T *row = (T*)a.qkv + t * a.ld_qkv, *keys = row + hq * d + a.gap;
  const float* cs = angles(a, position);
  if (a.q_weight || cs)
    norm_rope_heads<T>(hq, a.q_weight, a, [&](long h) { return Head<T>{row + h * d, row + h * d, cs}; });
  if constexpr (kScaled<C>) {
    rotated_keys<T>(
        a, hk, [&](long h) { return Head<T>{keys + h * d, nullptr, cs}; },
        [&](long h, const T* key) { store_key<T, C>(a, key, slot, h); });
    for (long h = 0; h < hk; h++) store_value<T, C>(a, keys + (hk + h) * d, slot, h);
    return;
  }
  T *k = key_place<T>(a, slot), *v = value_place<T>(a, slot);
  norm_rope_heads<T>(hk, a.k_weight, a, [&](long h) { return Head<T>{keys + h * d, k + h * a.k_head, cs}; });
  for (long h = 0; h < hk; h++) memcpy(v + h * a.v_head, keys + (hk + h) * d, d * sizeof(T));
}

// Processes one head of q, k or v for `count` tokens, x with row stride ldx: writes q to a.qkv, k and v to the cache.
template <typename T, typename C>
void qkv_head(const QkvArgs& a, long head, const T* x, long ldx, const long* positions, const long* slots, long token,
              long count) {
  const long d = a.head_dim, hq = a.num_heads, hk = a.num_kv_heads;
  if (head < hq)
    norm_rope_heads<T>(count, a.q_weight, a, [&](long t) {
      return Head<T>{x + t * ldx, (T*)a.qkv + (token + t) * a.ld_qkv + head * d, angles(a, positions[token + t])};
    });
  else if constexpr (kScaled<C>) {
    if (head < hq + hk)
      rotated_keys<T>(a, count, [&](long t) { return Head<T>{x + t * ldx, nullptr, angles(a, positions[token + t])}; },
                      [&](long t, const T* key) { store_key<T, C>(a, key, slots[token + t], head - hq); });
    else
      for (long t = 0; t < count; t++) store_value<T, C>(a, x + t * ldx, slots[token + t], head - hq - hk);
  }
  else if (head < hq + hk)
    norm_rope_heads<T>(count, a.k_weight, a, [&](long t) {
      return Head<T>{x + t * ldx, key_place<T>(a, slots[token + t]) + (head - hq) * a.k_head,
                     angles(a, positions[token + t])};
    });
  else {
    const auto place = [&](long t) { return value_place<T>(a, slots[token + t]) + (head - hq - hk) * a.v_head; };
    for (long t = 0; t < count; t++) {
      if (t + 8 < count) fetch_to_write(place(t + 8), d);
      memcpy(place(t), x + t * ldx, d * sizeof(T));
    }
  }
}

template <typename T, typename C>
void write_token(const QkvArgs& a, const T* k, const T* v, long slot) {
  const long d = a.head_dim, dv = a.v_dim;
  for (long h = 0; h < a.num_kv_heads; h++, k += d, v += dv) {
    if constexpr (kScaled<C>) {
      store_key<T, C>(a, k, slot, h), store_value<T, C>(a, v, slot, h);
    } else {
      memcpy(key_place<T>(a, slot) + h * a.k_head, k, d * sizeof(T));
      memcpy(value_place<T>(a, slot) + h * a.v_head, v, dv * sizeof(T));
    }
  }
}

}  // namespace

// dtype: 0 float32, 1 bfloat16, 2 float16.
#define DISPATCH(dtype, CALL)                                 \
  switch (dtype) {                                            \
    case 0: { using T = float; CALL; } break;                 \
    case 1: { using T = bf16; CALL; } break;                  \
    default: { using T = f16; CALL; } break;                  \
  }

// C: the type of the cache, that of the activations T or one of 8 bits.
#define DISPATCH_CACHE(cache, CALL)                           \
  switch (cache) {                                            \
    case kLikeActivations: { using C = T; CALL; } break;      \
    case kInt8: { using C = int8_t; CALL; } break;            \
    default: { using C = e4m3; CALL; } break;                 \
  }

extern "C" {

// Computes residual += x, out = norm(residual), or out = norm(x), which may be x, if residual is null. wide: the weight
// is float32.
void quire_add_rms_norm(const void* x, long ldx, void* residual, long ldr, const void* weight, void* out, long ldo,
                        long rows, long h, float eps, int dtype, int wide) {
  DISPATCH(dtype, parallel_rows(rows, rows * h, [&](long r) {
             const T* from = (const T*)x + r * ldx;
             T *sum = residual ? (T*)residual + r * ldr : nullptr, *to = (T*)out + r * ldo;
             if (wide) return add_rms_norm_row(from, sum, (const float*)weight, to, h, eps);
             add_rms_norm_row(from, sum, (const T*)weight, to, h, eps);
           }));
}

// Computes out [rows, width] = silu(x[:, :width]) * x[:, width:] for x [rows, 2 * width].
void quire_silu_and_mul(const void* x, long ldx, void* out, long ldo, long rows, long width, int dtype) {
  DISPATCH(dtype, parallel_rows(rows, rows * width,
                                [&](long r) { silu_and_mul_row<T>((const T*)x + r * ldx, (T*)out + r * ldo, width); }));
}

// Normalises and rotates q (in place) and k, and writes k and v of each token to its slot.
void quire_qkv_to_cache(const QkvArgs* a, void* qkv, const long* positions, const long* slots, long num_tokens) {
  QkvArgs args = *a;
  args.qkv = qkv;
  const long elements = num_tokens * (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
  DISPATCH(a->dtype, DISPATCH_CACHE(a->cache, parallel_rows(num_tokens, elements, [&](long t) {
                                      (qkv_token<T, C>)(args, t, positions[t], slots[t]);
                                    })));
}

// Does the same for one head of q, k or v of the `count` bf16 tokens from `token` on, read from x with row stride ldx.
// Runs in the calling thread.
void quire_qkv_head_to_cache(const QkvArgs* a, long head, const bf16* x, long ldx, const long* positions,
                             const long* slots, long token, long count) {
  using T = bf16;
  DISPATCH_CACHE(a->cache, (qkv_head<T, C>)(*a, head, x, ldx, positions, slots, token, count));
}

// Copies k [num_tokens, num_kv_heads, head_dim] and v [.., v_dim] (row strides ldk, ldv) to their slots. Strides and
// sizes are in `a`.
void quire_write_kv(const QkvArgs* a, const void* k, long ldk, const void* v, long ldv, const long* slots,
                    long num_tokens) {
  DISPATCH(
      a->dtype,
      DISPATCH_CACHE(a->cache, parallel_rows(num_tokens, num_tokens * 2 * a->num_kv_heads * a->head_dim, [&](long t) {
                       (write_token<T, C>)(*a, (const T*)k + t * ldk, (const T*)v + t * ldv, slots[t]);
                     })));
}
}
