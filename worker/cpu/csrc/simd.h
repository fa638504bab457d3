// Vector types and functions, for AVX-512, AVX2 and NEON. Every kernel is written once against these few functions.
//
// `vf` is sixteen floats: one AVX-512 register, two of AVX2, four of NEON. `load` and `store` are overloaded on the
// element type, so a template over the cache's dtype (float, bf16, f16) supports all three.
//
// `Floats` and `Ints` are one register of the instruction set, kLanes entries of 32 bits; with NEON, whose registers
// are half as wide as AVX2's and twice as many, two. Products (vector_tiles.h, fixed_tiles.h) count registers, since
// the number of registers limits how many sums a loop can keep. GCC's operators work on both types.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "machine.h"

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // sign, 4 bits of exponent, 3 of fraction; load() returns the number divided by 256

// Prefetches ahead of `line` in a stream that is read once; called for each line as it is used. The stream is fetched
// in two stages, into L2 and from there into L1: a line on its way from memory to L1 occupies one of the core's 16 fill
// buffers all the time, while for a line on its way to L2 the hardware prefetcher has usually issued the request
// already. (always_inline, because GCC otherwise takes it for a function without effect and drops it.)
__attribute__((always_inline)) static inline void read_ahead(const void* line) {
#if defined(__AVX512F__) && !defined(__AMX_TILE__)
  prefetch_l2((const char*)line + 8192);  // without the second stage: up to 1.2 x for one row (Zen 4)
#else
  prefetch_l2((const char*)line + 6144);
  prefetch_l1((const char*)line + 1024);
#endif
}

static constexpr float kNegInf = -std::numeric_limits<float>::infinity();

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline bf16 to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40)};  // NaN stays NaN
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}

static inline void store_scalar(float* p, float x) { *p = x; }
static inline void store_scalar(bf16* p, float x) { *p = to_bf16(x); }
#if defined(__x86_64__)
static inline float to_float(f16 x) { return _cvtsh_ss(x.bits); }
static inline void store_scalar(f16* p, float x) { p->bits = _cvtss_sh(x, 0); }
#else
static inline float to_float(f16 x) {
  __fp16 half;
  memcpy(&half, &x, 2);
  return half;
}
static inline void store_scalar(f16* p, float x) {
  const __fp16 half = x;
  memcpy(p, &half, 2);
}
#endif

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_neon.h"
#endif

// Calls f(0) .. f(N - 1), fully unrolled, so that an array indexed by the argument stays in registers.
template <typename F, int... I>
__attribute__((always_inline)) inline void unrolled(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F>
__attribute__((always_inline)) inline void unrolled(F&& f) { unrolled(f, std::make_integer_sequence<int, N>()); }

#if defined(__x86_64__)
// The upper four bits of each byte
static inline Ints upper_halves(Ints x) { return words_right<4>(x) & set1_words(0x0f0f); }

// N dwords for products of each with all lanes
template <int N> struct Operands {
  const int32_t* x;
  explicit Operands(const int32_t* x) : x(x) {}
  template <int I> Ints one() const { return set1_ints(x[I]); }
};
#if QUIRE_BYTE_PRODUCTS
// The same as with the entries of x, with dword I of it.
template <int I, int N> static inline Ints add_byte_products(Ints sum, Ints bytes, const Operands<N>& x) {
  return add_byte_products(sum, bytes, x.template one<I>());
}
#endif
#endif

// Convert bf16 to float: the even or the odd elements of pairs.
static inline Floats evens(Ints pairs) { return (Floats)left<16>(pairs); }
static inline Floats odds(Ints pairs) { return (Floats)(pairs & set1_ints(int(0xffff0000u))); }
// sum += the two products of bf16 in each lane, for levels that have no instruction for it
template <typename I>
static inline Floats add_pair_products(Floats sum, I pairs, Ints x) {
  return fma(odds(pairs), odds(x), fma(evens(pairs), evens(x), sum));
}

static inline vf exp(vf x) { return exp2(x * set1(1.44269504f)); }  // for x <= ~88

// Returns e^x within about one unit in the last place, for -87 < x <= 88; reduces the argument in two parts (Cephes'
// expf).
static inline vf exp_exact(vf x) {
  const vf n = nearest(x * set1(1.44269504f));
  const vf f = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  vf p = fma(set1(1.9875691500e-4f), f, set1(1.3981999507e-3f));
  p = fma(p, f, set1(8.3334519073e-3f));
  p = fma(p, f, set1(4.1665795894e-2f));
  p = fma(p, f, set1(1.6666665459e-1f));
  p = fma(p, f, set1(5.0000001201e-1f));
  return scaled(fma(p, f * f, f) + set1(1.f), n);
}

// tanh with an absolute error below 1e-6, enough for a soft cap.
static inline vf tanh(vf x) {
  vf e = exp(min(max(x + x, set1(-30.f)), set1(30.f)));
  return (e - set1(1.f)) / (e + set1(1.f));
}

// x / (1 + exp(-x)); the argument is clamped so that exp stays finite.
static inline vf silu(vf x) { return x / (set1(1.f) + exp(min(zero() - x, set1(87.f)))); }

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written as x times a sigmoid.
static inline vf gelu_tanh(vf x) {
  const vf twice = x * fma(x * x, set1(0.0713548163f), set1(1.59576912f));
  return x / (set1(1.f) + exp(min(zero() - twice, set1(87.f))));
}
