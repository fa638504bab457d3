// y[m, n] = x[m, k] W[n, k]^T (+ bias) for a weight in the blocks of a GGUF file, which stay as they are in the file.
//
// Activations become 16-bit integers with one scale per 256, finer than bf16. Four rows of the weight are unpacked 256
// values at a time into L1 and multiplied by all rows of a chunk of x that stays in L2. A lane adds 256 / kLanes
// products, whose sum fits 32 bits, before the scales are applied.
#include <algorithm>
#include <cmath>

#include "blocks.h"
#include "parallel.h"
#include "vector_tiles.h"

namespace {

constexpr int kRows = 4;           // rows of the weight that are multiplied together
constexpr int kMostChunk = 32;     // rows of x in a chunk; their sums stay in L1
constexpr int kTogether = kLanes == 16 ? 4 : 2;  // rows of x that are multiplied together
constexpr long kChunkBytes = 512 << 10;
constexpr float kTop = kLanes == 16 ? 32767.f : 16383.f;

thread_local Scratch shared_scratch, own_scratch;

// Rows of x as integers, with the sums of 16 values each.
struct BlockRows {
  long steps;  // of 256 values
  int16_t* values;
  float *scales, *sums;  // [rows][steps], [rows][steps][16]; sums include the scales
  BlockRows(char* memory, long rows, long k) : steps((k + kSuper - 1) / kSuper) {
    values = (int16_t*)memory;
    sums = (float*)(memory + rows * steps * kSuper * 2);
    scales = sums + rows * steps * 16;
  }
  static size_t bytes(long rows, long k) { return rows * ((k + kSuper - 1) / kSuper) * (kSuper * 2 + 17 * 4); }

  void fill(long row, const bf16* x, long k) const {
    for (long s = 0; s < steps; s++) {
      const long begin = s * kSuper, count = std::min<long>(kSuper, k - begin);
      alignas(64) float wide[kSuper] = {};
      vf tops = zero();
      for (long i = 0; i + 16 <= count; i += 16) store(wide + i, load(x + begin + i));
      for (long i = count / 16 * 16; i < count; i++) wide[i] = to_float(x[begin + i]);
      for (int i = 0; i < kSuper; i += 16) tops = max(tops, max(load(wide + i), zero() - load(wide + i)));
      const float top = reduce_max(tops), scale = top / kTop, inverse = top > 1e-30f ? kTop / top : 0.f;
      int16_t* to = values + (row * steps + s) * kSuper;
      scales[row * steps + s] = scale;
      for (int i = 0; i < kSuper; i += 16) {
        const vf n = nearest(load(wide + i) * set1(inverse));
        store_words(to + i, n);
        sums[(row * steps + s) * 16 + i / 16] = reduce_add(n) * scale;
      }
    }
  }
};

// sums[i][r] += 256 values of row row + i of x, i < ROWS, times those of each of the unpacked rows r. A register of
// either serves several products.
template <int TYPE, int ROWS>
inline void multiply(const Unpacked* u, const BlockRows& x, long row, long s, Floats (*sums)[kRows]) {
  constexpr int SPAN = is_super(TYPE) ? kSuper : kSmall;  // values between applications of scales
  const long ld = x.steps * kSuper;
  const int16_t* v = x.values + row * ld + s * kSuper;
  Floats part[ROWS][kRows];
  for (int span = 0; span < kSuper / SPAN; span++) {
    Ints products[ROWS][kRows] = {};
#pragma GCC unroll 8
    for (int j = span * SPAN; j < (span + 1) * SPAN; j += kWords) {
      Ints w[kRows];
      unrolled<kRows>([&](auto r) __attribute__((always_inline)) { w[r] = load_ints(u[r].w + j); });
      unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
        const Ints values = load_ints(v + i * ld + j);
        unrolled<kRows>([&](auto r) __attribute__((always_inline)) { products[i][r] = add_products(products[i][r], w[r], values); });
      });
    }
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      const Floats d = set1_floats(u[r].d[span]);
      unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
        part[i][r] = span ? fma(to_floats(products[i][r]), d, part[i][r]) : to_floats(products[i][r]) * d;
      });
    });
  }
  unrolled<ROWS>([&](auto i) __attribute__((always_inline)) {
    const long at = (row + i) * x.steps + s;
    const Floats scale = set1_floats(x.scales[at]);
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      Floats sum = fma(part[i][r], scale, sums[i][r]);
      if constexpr (has_minima(TYPE))
        for (int j = 0; j < 16; j += kLanes) sum = sum - load_floats(u[r].minima + j) * load_floats(x.sums + at * 16 + j);
      sums[i][r] = sum;
    });
  });
}

inline float total(Floats x) {
  float lanes[kLanes], sum = 0;
  store_floats(lanes, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  sum = lanes[0];
  return sum;
}

struct BlockProduct {
  const uint8_t* data;
  long row_bytes, n, k;
  const float* bias;  // may be null
  void* out;
  long ldo;
  bool out_f32;

  template <int TYPE>
  void tile(const BlockRows& x, long row, int rows, long first) const {
    Unpacked u[kRows];
    Floats sums[kMostChunk][kRows] = {};
    for (long s = 0; s < x.steps; s++) {
      for (int r = 0; r < kRows; r++) {
        const uint8_t* weights = data + std::min(first + r, n - 1) * row_bytes;
        if (rows <= 4) {  // the stream of few rows waits for memory
          const uint8_t* ahead = weights + s * (row_bytes / x.steps) + 2048;
          for (long i = 0; i < row_bytes / x.steps; i += 64) _mm_prefetch((const char*)ahead + i, _MM_HINT_T0);
        }
        unpack<TYPE>(weights, s, k, u[r]);
      }
      int i = 0;
      for (; i + kTogether <= rows; i += kTogether) multiply<TYPE, kTogether>(u, x, row + i, s, sums + i);
      for (; i < rows; i++) multiply<TYPE, 1>(u, x, row + i, s, sums + i);
    }
    for (int r = 0; r < kRows && first + r < n; r++)
      for (int i = 0; i < rows; i++) put(row + i, first + r, total(sums[i][r]));
  }

  void put(long row, long column, float value) const {
    if (bias) value += bias[column];
    if (out_f32) ((float*)out)[row * ldo + column] = value;
    else ((bf16*)out)[row * ldo + column] = to_bf16(value);
  }

  template <int TYPE>
  void run(const bf16* x, long ldx, long m) const {
    const long row_size = BlockRows::bytes(1, k), chunk = std::clamp(kChunkBytes / row_size, 4L, long(kMostChunk));
    const BlockRows rows((char*)shared_scratch.get(BlockRows::bytes(m, k)), m, k);
    parallel_for(m, 1, [&](long r) { rows.fill(r, x + r * ldx, k); });
    const long tiles = (n + kRows - 1) / kRows, together = 8;  // tiles that a thread takes at a time
    for (long row = 0; row < m; row += chunk)
      parallel_for(tiles, together, [&](long t) { tile<TYPE>(rows, row, int(std::min(chunk, m - row)), t * kRows); });
  }
};

template <int TYPE>
void widen_row(const uint8_t* row, long k, bf16* out) {
  Unpacked u;
  for (long s = 0; s * kSuper < k; s++) {
    unpack<TYPE>(row, s, k, u);
    for (long i = 0; i < std::min<long>(kSuper, k - s * kSuper); i++) {
      const float d = u.d[is_super(TYPE) ? 0 : i / kSmall];
      out[s * kSuper + i] = to_bf16(d * u.w[i] - (has_minima(TYPE) ? u.minima[i / 16] : 0.f));
    }
  }
}

// Calls f with the type as a compile-time constant.
template <typename F>
void of_type(int type, F&& f) {
  switch (type) {
#define CASE(T) case T: f(std::integral_constant<int, T>()); break;
    CASE(kQ4_0) CASE(kQ4_1) CASE(kQ5_0) CASE(kQ5_1) CASE(kQ8_0) CASE(kQ2_K) CASE(kQ3_K) CASE(kQ4_K) CASE(kQ5_K) CASE(kQ6_K) CASE(kIQ4_NL) CASE(kIQ4_XS) CASE(kMXFP4)
#undef CASE
  }
}

}  // namespace

extern "C" {

// x [m, k] bf16 with row stride ldx; data [n][row_bytes] of blocks of `type` (BlockType); bias [n] float32 or null; out
// [m, n] bf16 or float32 with row stride ldo. k: a multiple of the type's block.
void quire_blocks_run(const bf16* x, long ldx, const uint8_t* data, long row_bytes, int type, const float* bias, void* out, long ldo, long m, long n, long k, int out_f32) {
  const BlockProduct product{data, row_bytes, n, k, bias, out, ldo, out_f32 != 0};
  of_type(type, [&](auto constant) { product.run<constant>(x, ldx, m); });
}

// out[i, :k] = row ids[i] of the weight, in bf16; for an embedding.
void quire_blocks_rows(const uint8_t* data, long row_bytes, int type, const long* ids, long num_ids, bf16* out, long k) {
  of_type(type, [&](auto constant) { parallel_for(num_ids, 4, [&](long i) { widen_row<constant>(data + ids[i] * row_bytes, k, out + i * k); }); });
}
}
