// The functions of simd.h with NEON. A pair of registers is used like one of AVX2.
#pragma once

#include <arm_neon.h>

struct Ints;
struct Floats {
  float32x4_t a, b;
  Floats() = default;
  Floats(float32x4_t a, float32x4_t b) : a(a), b(b) {}
  explicit Floats(Ints x);
  float operator[](int i) const { return i < 4 ? a[i] : b[i - 4]; }
};
struct Ints {
  int32x4_t a, b;
  Ints() = default;
  Ints(int32x4_t a, int32x4_t b) : a(a), b(b) {}
  explicit Ints(Floats x) : a(vreinterpretq_s32_f32(x.a)), b(vreinterpretq_s32_f32(x.b)) {}
};
inline Floats::Floats(Ints x) : a(vreinterpretq_f32_s32(x.a)), b(vreinterpretq_f32_s32(x.b)) {}
constexpr int kLanes = 8;

static inline Floats operator+(Floats x, Floats y) { return {x.a + y.a, x.b + y.b}; }
static inline Floats operator-(Floats x, Floats y) { return {x.a - y.a, x.b - y.b}; }
static inline Floats operator*(Floats x, Floats y) { return {x.a * y.a, x.b * y.b}; }
static inline Floats operator/(Floats x, Floats y) { return {x.a / y.a, x.b / y.b}; }
static inline Ints operator&(Ints x, Ints y) { return {x.a & y.a, x.b & y.b}; }
static inline Ints operator|(Ints x, Ints y) { return {x.a | y.a, x.b | y.b}; }

static inline float32x4_t widen(uint16x4_t bits) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 8) << 8); }
static inline float32x4_t widen_half(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }

static inline Floats load_floats(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline Floats load_floats(const bf16* p) {
  const uint16x8_t bits = vld1q_u16((const uint16_t*)p), none = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(none, bits)), vreinterpretq_f32_u16(vzip2q_u16(none, bits))};
}
static inline Floats load_floats(const f16* p) {
  const uint16x8_t bits = vld1q_u16((const uint16_t*)p);
  return {widen_half(vget_low_u16(bits)), widen_half(vget_high_u16(bits))};
}
static inline void store_floats(float* p, Floats x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
static inline Floats set1_floats(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline Floats fma(Floats x, Floats y, Floats z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
static inline Floats max_floats(Floats x, Floats y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
static inline Floats root(Floats x) { return {vsqrtq_f32(x.a), vsqrtq_f32(x.b)}; }

// Applies a function of registers of bytes or words.
template <typename F>
static inline Ints by_bytes(Ints x, F&& f) {
  return {vreinterpretq_s32_u8(f(vreinterpretq_u8_s32(x.a))), vreinterpretq_s32_u8(f(vreinterpretq_u8_s32(x.b)))};
}
template <typename F>
static inline Ints by_words(Ints x, F&& f) {
  return {vreinterpretq_s32_u16(f(vreinterpretq_u16_s32(x.a))), vreinterpretq_s32_u16(f(vreinterpretq_u16_s32(x.b)))};
}
static inline Ints load_ints(const void* p) { return {vld1q_s32((const int32_t*)p), vld1q_s32((const int32_t*)p + 4)}; }
static inline void store_ints(void* p, Ints x) { vst1q_s32((int32_t*)p, x.a), vst1q_s32((int32_t*)p + 4, x.b); }
static inline Ints set1_ints(int x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
static inline Ints set1_words(int x) {
  const int32x4_t words = vreinterpretq_s32_s16(vdupq_n_s16(int16_t(x)));
  return {words, words};
}
static inline Ints repeat(const void* p) {
  const int32x4_t x = vld1q_s32((const int32_t*)p);
  return {x, x};
}
static inline Ints add_ints(Ints x, Ints y) { return {x.a + y.a, x.b + y.b}; }
static inline Ints max_ints(Ints x, Ints y) { return {vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b)}; }
static inline Ints sub_words(Ints x, Ints y) {
  return {vreinterpretq_s32_s16(vreinterpretq_s16_s32(x.a) - vreinterpretq_s16_s32(y.a)),
          vreinterpretq_s32_s16(vreinterpretq_s16_s32(x.b) - vreinterpretq_s16_s32(y.b))};
}
static inline Ints sub_bytes(Ints x, Ints y) {
  return {vreinterpretq_s32_s8(vreinterpretq_s8_s32(x.a) - vreinterpretq_s8_s32(y.a)),
          vreinterpretq_s32_s8(vreinterpretq_s8_s32(x.b) - vreinterpretq_s8_s32(y.b))};
}
template <int N> static inline Ints left(Ints x) { return {x.a << N, x.b << N}; }
template <int N> static inline Ints right(Ints x) {
  return {vreinterpretq_s32_u32(vreinterpretq_u32_s32(x.a) >> N),
          vreinterpretq_s32_u32(vreinterpretq_u32_s32(x.b) >> N)};
}
template <int N> static inline Ints signed_right(Ints x) { return {x.a >> N, x.b >> N}; }
template <int N> static inline Ints words_left(Ints x) { return by_words(x, [](uint16x8_t w) { return w << N; }); }
template <int N> static inline Ints words_right(Ints x) { return by_words(x, [](uint16x8_t w) { return w >> N; }); }
// The upper four bits of each byte
static inline Ints upper_halves(Ints x) { return by_bytes(x, [](uint8x16_t bytes) { return bytes >> 4; }); }
static inline Ints shuffle_bytes(Ints x, Ints order) {
  return {vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(x.a), vreinterpretq_u8_s32(order.a))),
          vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(x.b), vreinterpretq_u8_s32(order.b)))};
}
static inline Ints or_masked(Ints x, Ints y, Ints mask) { return x | (y & mask); }
static inline Ints odd_words(Ints even, Ints odd) {
  const uint32x4_t odds = vdupq_n_u32(0xffff0000u);
  return {vbslq_s32(odds, odd.a, even.a), vbslq_s32(odds, odd.b, even.b)};
}
static inline Floats to_floats(Ints x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
static inline Ints to_ints(Floats x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
static inline Ints truncated(Floats x) { return {vcvtq_s32_f32(x.a), vcvtq_s32_f32(x.b)}; }
static inline Ints widen_bytes(const uint8_t* p) {
  const uint16x8_t words = vmovl_u8(vld1_u8(p));
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words))), vreinterpretq_s32_u32(vmovl_high_u16(words))};
}
static inline Ints widen_signed_bytes(const int8_t* p) {
  const int16x8_t words = vmovl_s8(vld1_s8(p));
  return {vmovl_s16(vget_low_s16(words)), vmovl_high_s16(words)};
}
static inline Ints words_of_bytes(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  return {vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(bytes))), vreinterpretq_s32_s16(vmovl_high_s8(bytes))};
}
static inline Ints widen_words(const void* p) {
  const uint16x8_t words = vld1q_u16((const uint16_t*)p);
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words))), vreinterpretq_s32_u32(vmovl_high_u16(words))};
}
static inline int32x4_t word_pairs(int32x4_t x, int32x4_t y) {
  const int16x8_t p = vreinterpretq_s16_s32(x), q = vreinterpretq_s16_s32(y);
  return vpaddq_s32(vmull_s16(vget_low_s16(p), vget_low_s16(q)), vmull_high_s16(p, q));
}
static inline Ints add_products(Ints sum, Ints x, Ints y) {
  return {sum.a + word_pairs(x.a, y.a), sum.b + word_pairs(x.b, y.b)};
}
// The totals of four registers' entries.
static inline int32x4_t totals_of(const Ints* x) {
  return vpaddq_s32(vpaddq_s32(x[0].a + x[0].b, x[1].a + x[1].b), vpaddq_s32(x[2].a + x[2].b, x[3].a + x[3].b));
}
static inline void store_totals(float* p, const Ints* four, float unit) {
  vst1q_f32(p, vcvtq_f32_s32(totals_of(four)) * vdupq_n_f32(unit));
}

// N dwords (a multiple of four) for products of each with all lanes
template <int N> struct Operands {
  int32x4_t four[N / 4];
  explicit Operands(const int32_t* x) {
    for (int i = 0; i < N / 4; i++) four[i] = vld1q_s32(x + i * 4);
  }
  template <int I> Ints one() const {
    const int32x4_t dword = vdupq_laneq_s32(four[I / 4], I % 4);
    return {dword, dword};
  }
};
#if defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_BYTE_PRODUCTS 1
// sum += the four products of the bytes (unsigned; if kSignedBytes, signed) and the signed bytes of x in each lane.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSignedBytes = false;
static inline Ints add_byte_products(Ints sum, Ints bytes, Ints x) {
  return {vusdotq_s32(sum.a, vreinterpretq_u8_s32(bytes.a), vreinterpretq_s8_s32(x.a)),
          vusdotq_s32(sum.b, vreinterpretq_u8_s32(bytes.b), vreinterpretq_s8_s32(x.b))};
}
// The same with dword I of x.
template <int I, int N> static inline Ints add_byte_products(Ints sum, Ints bytes, const Operands<N>& x) {
  const int8x16_t four = vreinterpretq_s8_s32(x.four[I / 4]);
  return {vusdotq_laneq_s32(sum.a, vreinterpretq_u8_s32(bytes.a), four, I % 4),
          vusdotq_laneq_s32(sum.b, vreinterpretq_u8_s32(bytes.b), four, I % 4)};
}
#else
constexpr bool kSignedBytes = true;
static inline Ints add_byte_products(Ints sum, Ints bytes, Ints x) {
  return {vdotq_s32(sum.a, vreinterpretq_s8_s32(bytes.a), vreinterpretq_s8_s32(x.a)),
          vdotq_s32(sum.b, vreinterpretq_s8_s32(bytes.b), vreinterpretq_s8_s32(x.b))};
}
template <int I, int N> static inline Ints add_byte_products(Ints sum, Ints bytes, const Operands<N>& x) {
  const int8x16_t four = vreinterpretq_s8_s32(x.four[I / 4]);
  return {vdotq_laneq_s32(sum.a, vreinterpretq_s8_s32(bytes.a), four, I % 4),
          vdotq_laneq_s32(sum.b, vreinterpretq_s8_s32(bytes.b), four, I % 4)};
}
#endif
#else
#define QUIRE_BYTE_PRODUCTS 0
constexpr bool kSignedBytes = false;
#endif

// The sums of four products of codes below 64 and signed bytes in each lane, of N registers, added to sum. The sums of
// N pairs of products must fit 16 bits.
template <int N>
static inline int32x4_t add_small_products(int32x4_t sum, const int8x16_t* codes, const int8x16_t* x) {
  int16x8_t low = vmull_s8(vget_low_s8(codes[0]), vget_low_s8(x[0])), high = vmull_high_s8(codes[0], x[0]);
  for (int i = 1; i < N; i++)
    low = vmlal_s8(low, vget_low_s8(codes[i]), vget_low_s8(x[i])), high = vmlal_high_s8(high, codes[i], x[i]);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
}
template <int N>
static inline Ints add_small_products(Ints sum, const Ints* codes, const int32_t* x, long stride) {
  int8x16_t first[N], second[N], by[N];
  for (int i = 0; i < N; i++) {
    first[i] = vreinterpretq_s8_s32(codes[i].a), second[i] = vreinterpretq_s8_s32(codes[i].b);
    by[i] = vreinterpretq_s8_s32(vdupq_n_s32(x[i * stride]));
  }
  return {add_small_products<N>(sum.a, first, by), add_small_products<N>(sum.b, second, by)};
}

// Whether one instruction multiplies twice as many words as floats
constexpr bool kFastWords = false;
// sum += the two products of bf16 in each lane.
#if defined(__ARM_FEATURE_BF16)
constexpr bool kPairDots = true;
static inline Floats add_pair_products(Floats sum, Ints pairs, Ints x) {
  auto halves = [](int32x4_t x) { return vreinterpretq_bf16_s32(x); };
  return {vbfdotq_f32(sum.a, halves(pairs.a), halves(x.a)), vbfdotq_f32(sum.b, halves(pairs.b), halves(x.b))};
}
#else
constexpr bool kPairDots = false;
#endif

static inline void transpose_4x4(int32x4_t& a, int32x4_t& b, int32x4_t& c, int32x4_t& d) {
  const int64x2_t s = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), t = vreinterpretq_s64_s32(vtrn2q_s32(a, b)),
                  u = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), v = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
  a = vreinterpretq_s32_s64(vtrn1q_s64(s, u)), b = vreinterpretq_s32_s64(vtrn1q_s64(t, v));
  c = vreinterpretq_s32_s64(vtrn2q_s64(s, u)), d = vreinterpretq_s32_s64(vtrn2q_s64(t, v));
}
// Transposes eight rows of eight dwords.
static inline void transpose(Ints* r) {
  for (int i = 0; i < 8; i += 4) {
    transpose_4x4(r[i].a, r[i + 1].a, r[i + 2].a, r[i + 3].a);
    transpose_4x4(r[i].b, r[i + 1].b, r[i + 2].b, r[i + 3].b);
  }
  for (int i = 0; i < 4; i++) std::swap(r[i].b, r[i + 4].a);
}

struct vf { Floats a, b; };

static inline vf whole(const Floats* r) { return {r[0], r[1]}; }
static inline Floats part(vf x, int i) { return i ? x.b : x.a; }
static inline vf zero() { return {set1_floats(0), set1_floats(0)}; }
static inline vf set1(float x) { return {set1_floats(x), set1_floats(x)}; }
static inline vf load(const float* p) { return {load_floats(p), load_floats(p + 8)}; }
static inline vf load(const bf16* p) { return {load_floats(p), load_floats(p + 8)}; }
static inline vf load(const f16* p) { return {load_floats(p), load_floats(p + 8)}; }
static inline vf load(const int8_t* p) {
  return {to_floats(widen_signed_bytes(p)), to_floats(widen_signed_bytes(p + 8))};
}
// As float16, whose exponents are larger by 8, the bits are the number divided by 2^8.
static inline vf load(const e4m3* p) {
  const int8x16_t bytes = vld1q_s8((const int8_t*)p);
  auto halves = [](int16x8_t words) -> Floats {
    const uint16x8_t bits = vreinterpretq_u16_s16(words << 7) & vdupq_n_u16(0xbf80);
    return {widen_half(vget_low_u16(bits)), widen_half(vget_high_u16(bits))};
  };
  return {halves(vmovl_s8(vget_low_s8(bytes))), halves(vmovl_high_s8(bytes))};
}
static inline void store(float* p, vf x) { store_floats(p, x.a), store_floats(p + 8, x.b); }
static inline void store(f16* p, vf x) {
  auto halves = [](Floats x) { return vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b); };
  vst1q_u16((uint16_t*)p, vreinterpretq_u16_f16(halves(x.a)));
  vst1q_u16((uint16_t*)p + 8, vreinterpretq_u16_f16(halves(x.b)));
}
#if defined(__ARM_FEATURE_BF16)
static inline void store(bf16* p, vf x) {
  auto halves = [](Floats x) { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.a), x.b); };
  vst1q_bf16((bfloat16_t*)p, halves(x.a)), vst1q_bf16((bfloat16_t*)p + 8, halves(x.b));
}
#else
static inline uint32x4_t rounded_bits(float32x4_t x) {
  const uint32x4_t u = vreinterpretq_u32_f32(x), odd = (u >> 16) & 1, rounded = u + odd + 0x7fff;
  return vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
}
static inline void store(bf16* p, vf x) {
  auto halves = [](Floats x) {
    return vuzp2q_u16(vreinterpretq_u16_u32(rounded_bits(x.a)), vreinterpretq_u16_u32(rounded_bits(x.b)));
  };
  vst1q_u16((uint16_t*)p, halves(x.a)), vst1q_u16((uint16_t*)p + 8, halves(x.b));
}
#endif
// Rounds x to the precision of T.
template <typename T> static inline vf rounded(vf x) {
  T t[16];
  store(t, x);
  return load(t);
}
template <> inline vf rounded<float>(vf x) { return x; }

// Applies a function of registers.
template <typename F, typename... X>
static inline vf by_registers(F&& f, X... x) {
  return {{f(x.a.a...), f(x.a.b...)}, {f(x.b.a...), f(x.b.b...)}};
}
static inline vf operator+(vf x, vf y) { return {x.a + y.a, x.b + y.b}; }
static inline vf operator-(vf x, vf y) { return {x.a - y.a, x.b - y.b}; }
static inline vf operator*(vf x, vf y) { return {x.a * y.a, x.b * y.b}; }
static inline vf operator/(vf x, vf y) { return {x.a / y.a, x.b / y.b}; }
static inline vf fma(vf x, vf y, vf z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }
// As on x86, y if one of them is NaN.
static inline vf max(vf x, vf y) {
  return by_registers([](auto x, auto y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }, x, y);
}
static inline vf min(vf x, vf y) {
  return by_registers([](auto x, auto y) { return vbslq_f32(vcltq_f32(x, y), x, y); }, x, y);
}
static inline vf root(vf x) { return {root(x.a), root(x.b)}; }
static inline float reduce_add(vf x) { return vaddvq_f32((x.a.a + x.b.a) + (x.a.b + x.b.b)); }
static inline float reduce_max(vf x) {
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.a.a, x.b.a), vmaxnmq_f32(x.a.b, x.b.b)));
 }
// Returns lanes lo <= lane < hi of x, and `other` in the remaining lanes.
static inline vf select_range(vf x, int lo, int hi, vf other) {
  const int32x4_t low = vdupq_n_s32(lo), high = vdupq_n_s32(hi), first = {0, 1, 2, 3};
  auto pick = [&](float32x4_t x, float32x4_t y, int begin) {
    const int32x4_t lane = first + begin;
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, low), vcltq_s32(lane, high)), x, y);
  };
  return {{pick(x.a.a, other.a.a, 0), pick(x.a.b, other.a.b, 4)},
          {pick(x.b.a, other.b.a, 8), pick(x.b.b, other.b.b, 12)}};
}
static inline vf nearest(vf x) { return by_registers([](auto x) { return vrndnq_f32(x); }, x); }
static inline vf zero_below(vf x, vf least) {
  return by_registers(
      [](auto x, auto y) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vcgeq_f32(x, y))); }, x,
      least);
}
static inline bool any_nan(vf x, vf y) {
  const vf ordered = by_registers(
      [](auto x, auto y) { return vreinterpretq_f32_u32(vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y))); }, x, y);
  auto bits = [](Floats x) { return vreinterpretq_u32_f32(x.a) & vreinterpretq_u32_f32(x.b); };
  return vminvq_u32(bits(ordered.a) & bits(ordered.b)) == 0;
}
// Returns x * 2^n for integer n; the result must be a normal number.
static inline vf scaled(vf x, vf n) {
  return by_registers(
      [](auto x, auto n) { return x * vreinterpretq_f32_s32((vcvtnq_s32_f32(n) + 127) << 23); }, x, n);
}
static inline int append_not_below(float* p, vf x, vf least) {
  float t[16], bound[16];
  store(t, x);
  store(bound, least);
  int n = 0;
  for (int i = 0; i < 16; i++) {
    p[n] = t[i];
    n += t[i] >= bound[i];
  }
  return n;
}
// Sixteen floats, which are integers, as words.
struct Words { int16x8_t a, b; };
static inline Words words_of(vf x) {
  auto words = [](Floats x) { return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(x.a)), vcvtnq_s32_f32(x.b)); };
  return {words(x.a), words(x.b)};
}
static inline void store_bytes(int8_t* p, vf x) {
  const Words words = words_of(x);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(words.a), words.b));
}
static inline void store_words(int16_t* p, vf x) {
  const Words words = words_of(x);
  vst1q_s16(p, words.a), vst1q_s16(p + 8, words.b);
}
// Stores each four of sixteen integers as two dwords: their high and low bytes, 256 * high + low, or, without products
// of bytes, the words 0, 2, 1, 3.
static inline void store_two_dwords(int32_t* p, vf x) {
  const Words words = words_of(x);
  auto put = [](int32_t* p, int16x8_t n) {
#if QUIRE_BYTE_PRODUCTS
    const int32x2_t low = vreinterpret_s32_s8(vmovn_s16(n)),
                    high = vreinterpret_s32_s8(vshrn_n_s16(vaddq_s16(n, vdupq_n_s16(128)), 8));
    vst1_s32(p, vzip1_s32(high, low)), vst1_s32(p + 2, vzip2_s32(high, low));
#else
    static constexpr uint8_t kOrder[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
    vst1q_u8((uint8_t*)p, vqtbl1q_u8(vreinterpretq_u8_s16(n), vld1q_u8(kOrder)));
#endif
  };
  put(p, words.a), put(p + 4, words.b);
}
// Returns 2^x for x <= 0 and -inf, with a relative error below 4e-7.
static inline vf exp2(vf x) {
  x = max(x, set1(-126.f));
  const vf n = nearest(x), f = x - n;
  vf p = fma(set1(0.0013276472f), f, set1(0.0096755413f));
  p = fma(p, f, set1(0.055507133f));
  p = fma(p, f, set1(0.24022123f));
  p = fma(p, f, set1(0.69314697f));
  p = fma(p, f, set1(1.0f));
  return scaled(p, n);
}
