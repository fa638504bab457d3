// Products by AVX-512, of any number of rows: where there is no AMX, or the rows are few and the weight is quantized.
#pragma once

#include "gemm.h"

#if defined(__AVX512F__)

namespace {

// acc += the two products of each of 16 columns; w holds 16 pairs of bf16, x one pair.
#if defined(__AVX512BF16__)
inline vf dot_pairs(vf acc, const bf16* w, uint32_t x) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(int(x)))};
}
#else
inline vf dot_pairs(vf acc, const bf16* w, uint32_t x) {
  __m512i p = _mm512_loadu_si512(w);
  vf even = {_mm512_castsi512_ps(_mm512_slli_epi32(p, 16))}, odd = {_mm512_castsi512_ps(_mm512_and_si512(p, _mm512_set1_epi32(int(0xffff0000u))))};
  return fma(odd, set1(to_float(bf16{uint16_t(x >> 16)})), fma(even, set1(to_float(bf16{uint16_t(x)})), acc));
}
#endif

// Rows of x, as pairs, zero beyond k. Each sum is in the order of k whatever ROWS is, so that a row's result does not
// depend on how many there are. A second chain of additions would hide latency for one row, but one row waits for memory.
template <int ROWS>
void vector_block(const Gemm& g, const bf16* x, long ldx, int row0, int nb) {
  const bf16* w = g.block(nb);
  vf acc[ROWS][2];
  for (auto& r : acc) r[0] = zero(), r[1] = zero();
  int pairs = (g.k + 1) / 2, steps = pairs / 16;
  auto pair_at = [&](int r, int p) {
    uint32_t v;
    memcpy(&v, x + r * ldx + 2 * p, 4);
    return v;
  };
  for (int s = 0; s < steps; s++, w += kStepElems) {
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++)
      for (int r = 0; r < ROWS; r++) {
        uint32_t v = pair_at(r, s * 16 + p);
        if (r == 0) read_ahead(w + p * 32), read_ahead(w + kStepElems / 2 + p * 32);
        acc[r][0] = dot_pairs(acc[r][0], w + p * 32, v);
        acc[r][1] = dot_pairs(acc[r][1], w + kStepElems / 2 + p * 32, v);
      }
  }
  for (int p = 0; p < pairs % 16; p++)
    for (int r = 0; r < ROWS; r++) {
      uint32_t v = pair_at(r, steps * 16 + p);
      acc[r][0] = dot_pairs(acc[r][0], w + p * 32, v);
      acc[r][1] = dot_pairs(acc[r][1], w + kStepElems / 2 + p * 32, v);
    }
  for (int r = 0; r < ROWS; r++) finish_row(g, row0 + r, nb * kCols, acc[r][0], acc[r][1]);
}

inline void run_vector(const Gemm& g, int threads) {
  assert(!g.compact);
  static constexpr void (*kRest[])(const Gemm&, const bf16*, long, int, int) = {vector_block<1>, vector_block<2>, vector_block<3>, vector_block<4>,
                                                                               vector_block<5>, vector_block<6>, vector_block<7>};
  const PaddedRows x(g, 2);
  over_blocks(g, threads, [&](auto&& each) {
    each([&](int nb) {
      int row = 0;
      for (; row + 8 <= g.m; row += 8) vector_block<8>(g, x.rows + row * x.ld, x.ld, row, nb);
      if (row < g.m) kRest[g.m - row - 1](g, x.rows + row * x.ld, x.ld, row, nb);
    });
  });
}

// Sixteen columns: acc += four products each, of the bytes of w and x in the order 0, 2, 1, 3.
struct vi { __m512i v; };
inline vi zero_int() { return {_mm512_setzero_si512()}; }
inline vi load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline vi low_halves(vi x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline vi high_halves(vi x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
inline vi even_bytes(vi w) { return {_mm512_and_si512(w.v, _mm512_set1_epi16(255))}; }
inline vi odd_bytes(vi w) { return {_mm512_srli_epi16(w.v, 8)}; }
inline vi add_products(vi acc, vi w, const int16_t* x) {
  int pair;
  memcpy(&pair, x, 4);
#if defined(__AVX512VNNI__)
  return {_mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi32(pair))};
#else
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(w.v, _mm512_set1_epi32(pair)))};
#endif
}
inline vi operator+(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline vf minus(vi a, int b) { return {_mm512_cvtepi32_ps(_mm512_sub_epi32(a.v, _mm512_set1_epi32(b)))}; }

// y[row][tile] = x W of ROWS rows for the 32 columns of block nb.
template <int ROWS, int BITS>
inline void vector_quant_block(const Quant& q, const QuantRows& x, long row0, int nb, vf (*y)[2]) {
  for (int r = 0; r < ROWS; r++) y[r][0] = y[r][1] = zero();
  const int16_t* rows = x.values + row0 * x.ld;
  const int k_end = q.k_steps * 64, stretch = q.group < 64 ? q.group : 64;
  for (int k0 = 0; k0 < k_end; k0 += q.run()) {
    const int k1 = k0 + q.run() < k_end ? k0 + q.run() : k_end;
    vi acc[2][ROWS][4];  // chains of additions, so that one need not wait for another
    constexpr int CHAINS = ROWS == 1 ? 4 : 2;
    for (auto& tile : acc) for (auto& row : tile) for (auto& a : row) a = zero_int();
    for (int k = k0; k < k1; k += stretch)
      for (int t = 0; t < 2; t++) {
        const uint8_t* src = q.step(nb, k / 64) + t * BITS * 128 + k % 64 * BITS * 2;
        auto row_of_tile = [&](int i, vi bytes) {  // i-th four of k of this stretch
          const vi even = even_bytes(bytes), odd = odd_bytes(bytes);
          for (int r = 0; r < ROWS; r++) {
            const int16_t* xs = rows + r * x.ld + k + i * 4;
            vi* chain = acc[t][r] + (CHAINS == 4 ? i % 2 * 2 : 0);
            chain[0] = add_products(chain[0], even, xs);
            chain[1] = add_products(chain[1], odd, xs + 2);
          }
        };
#pragma GCC unroll 4
        for (int i = 0; i < stretch / 4; i += 2, src += BITS * 16) {
          read_ahead(src);
          if (BITS == 8) {
            row_of_tile(i, load_bytes(src));
            read_ahead(src + 64);
            row_of_tile(i + 1, load_bytes(src + 64));
          } else {
            const vi packed = load_bytes(src);
            row_of_tile(i, low_halves(packed));
            row_of_tile(i + 1, high_halves(packed));
          }
        }
      }
    const long at = q.group_at(nb, k0);
    for (int r = 0; r < ROWS; r++) {
      const long i = (row0 + r) * x.runs + k0 / x.run;
      for (int t = 0; t < 2; t++) {
        vi total = acc[t][r][0] + acc[t][r][1];
        if (CHAINS == 4) total = total + (acc[t][r][2] + acc[t][r][3]);
        y[r][t] = fma(minus(total, q.zero_point() * x.sum[i]) * set1(x.scale[i]), load(q.scales + at + t * 16), y[r][t]);
        if (q.offsets) y[r][t] = fma(load(q.offsets + at + t * 16), set1(float(x.sum[i]) * x.scale[i]), y[r][t]);
      }
    }
  }
}

template <int ROWS>
void vector_quant_rows(const Gemm& g, const QuantRows& x, int row0, int nb) {
  vf y[ROWS][2];
  if (g.quant->bits == 8) vector_quant_block<ROWS, 8>(*g.quant, x, row0, nb, y);
  else vector_quant_block<ROWS, 4>(*g.quant, x, row0, nb, y);
  for (int r = 0; r < ROWS; r++) finish_row(g, row0 + r, nb * kCols, y[r][0], y[r][1]);
}

inline void run_quant_vector(const Gemm& g, int threads) {
  const QuantRows x = quant_rows(g, g.m, false);
  over_blocks(g, threads, [&](auto&& each) {
    each([&](int nb) {
      int r = 0;
      for (; r + 4 <= g.m; r += 4) vector_quant_rows<4>(g, x, r, nb);
      if (g.m - r == 3) vector_quant_rows<3>(g, x, r, nb);
      else if (g.m - r == 2) vector_quant_rows<2>(g, x, r, nb);
      else if (g.m - r == 1) vector_quant_rows<1>(g, x, r, nb);
    });
  });
}

}  // namespace

#endif
