// Attention in bf16 with AMX tiles: blocked flash attention (https://arxiv.org/abs/2205.14135). Packs 128 keys at a
// time into tiles for up to 1024 rows (tokens x query heads of one KV head): the rows of a prompt chunk, or of several
// requests that share these keys.
#pragma once

#include "amx.h"
#include "attention_rows.h"

#if QUIRE_AMX

namespace {

constexpr int kTileElems = 512;    // bf16 elements per tile
constexpr float kUnseen = -1e30f;  // a masked score, which softmax turns into 0

// Scratch memory of one task: `rows` rows (a multiple of 32) of head_dim d, values of dv elements.
struct FlashScratch {
  bf16 *q, *k, *v;
  float *s, *o, *m, *l;
  FlashScratch(char* base, long rows, long d, long dv) {
    auto take = [&](size_t bytes) { char* r = base; base += (bytes + 63) / 64 * 64; return r; };
    q = (bf16*)take(rows * d * 2);
    k = (bf16*)take(kKeys * d * 2);
    v = (bf16*)take(kKeys * dv * 2);
    s = (float*)take(32 * kKeys * 4);
    o = (float*)take(rows * dv * 4);
    m = (float*)take(rows * 4);
    l = (float*)take(rows * 64);
  }
  static size_t bytes(long rows, long d, long dv) {
    return rows * (d * 2 + dv * 4) + kKeys * (d + dv) * 2 + 32 * kKeys * 4 + rows * 68 + 1024;
  }
};

// Copies the queries of KV head h0 to dst [rows][d]: for each token, its query heads of h0. Zeroes unused rows.
void gather_queries(const Step& s, const Task& t, int rows, bf16* dst) {
  const long d = s.layer.head_dim, of_token = s.group() * d;
  for (int i = 0; i < t.count; i++, dst += of_token) {
    const bf16* q = (const bf16*)s.q + t.tokens[i] * s.ldq + t.h0 * of_token;
    for (long c = 0; c < of_token; c += 32) _mm512_store_si512(dst + c, _mm512_loadu_si512(q + c));
  }
  memset(dst, 0, (rows - t.count * s.group()) * d * sizeof(bf16));
}

// A key or a value of 8 bits as bf16.
template <typename C>
void widen_row(const void* cache, long place, float scale, long d, bf16* to) {
  const C* from = (const C*)cache + place;
  for (long c = 0; c < d; c += 16) store(to + c, load(from + c) * set1(scale * kLoadedPart<C>));
}
inline void widen_row(const Layer& l, const void* cache, long place, float scale, long d, bf16* to) {
  if (l.cache == kInt8) widen_row<int8_t>(cache, place, scale, d, to);
  else widen_row<e4m3>(cache, place, scale, d, to);
}

// Packs keys key .. key + n - 1 (n a multiple of 32) as right operands: K^T as [n / 32][d / 32][2][16 pairs of d]
// [16 keys][2], V as [dv / 32][kKeys / 32][2][16 pairs of keys][16 d][2]. The pairs have the order of softmax_row's
// probabilities: of 32 keys 0 .. 3, 16 .. 19, 4 .. 7, 20 .. 23 and so on. Keys outside [begin, end) become zeros: their
// memory may hold NaN, and 0 * NaN is NaN.
void pack_keys(const Layer& l, const int* table, long head, long key, int n, long begin, long end, bf16* kd, bf16* vd) {
  const long steps = l.head_dim / 32;
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int j0 = 0; j0 < n; j0 += 16) {
    const bf16 *k[16], *v[16];
    alignas(64) bf16 wide_k[16][576], wide_v[16][512];
    for (int j = 0; j < 16; j++) {
      const long at = key + j0 + j;
      k[j] = v[j] = nullptr;
      if (at < begin || at >= end) continue;
      const long at_k = l.k_place(table, at) + head * l.k_head, at_v = l.v_place(table, at) + head * l.v_head;
      k[j] = (const bf16*)l.k_cache + at_k, v[j] = (const bf16*)l.v_cache + at_v;
      if (l.cache == kLikeActivations) continue;
      const long block = table[at / l.block_size], slot = at % l.block_size;
      const long first = l.two_scales() ? l.v_dim : l.head_dim;  // entries with the first scale
      widen_row(l, l.k_cache, at_k, *l.k_scales.at(block, slot, head), first, wide_k[j]), k[j] = wide_k[j];
      if (l.two_scales())
        widen_row(l, l.k_cache, at_k + first, *l.rope_scales.at(block, slot, head), l.head_dim - first,
                  wide_k[j] + first);
      widen_row(l, l.v_cache, at_v, *l.v_scales.at(block, slot, head), l.v_dim, wide_v[j]), v[j] = wide_v[j];
    }
    for (long c = 0; c < steps; c++) {
      __m512i r[16];
      for (int j = 0; j < 16; j++) r[j] = k[j] ? _mm512_loadu_si512(k[j] + c * 32) : _mm512_setzero_si512();
      transpose_16x16(r);
      bf16* dst = kd + ((j0 / 32 * steps + c) * 2 + j0 / 16 % 2) * kTileElems;
      for (int j = 0; j < 16; j++) _mm512_store_si512(dst + j * 32, r[j]);
    }
    for (long c = 0; c < l.v_dim / 32; c++) {
      bf16* dst = vd + (c * (kKeys / 32) + j0 / 32) * 2 * kTileElems + j0 / 16 % 2 * 64;
      for (int j = 0; j < 16; j += 2) {
        __m512i x = v[j] ? _mm512_loadu_si512(v[j] + c * 32) : _mm512_setzero_si512(),
                y = v[j + 1] ? _mm512_loadu_si512(v[j + 1] + c * 32) : _mm512_setzero_si512();
        const int pair = j / 4 * 4 + j / 2 % 2;
        _mm512_store_si512(dst + pair * 32, _mm512_permutex2var_epi16(x, low, y));
        _mm512_store_si512(dst + kTileElems + pair * 32, _mm512_permutex2var_epi16(x, high, y));
      }
    }
  }
}

// Prefetches the keys [key, end) of a head and their values to L2, a few cache lines at a time.
class KeysAhead {
 public:
  KeysAhead(const Layer& l, const int* table, long head, long key, long end)
      : l_(l), table_(table), head_(head), key_(key), end_(end) {
    find();
  }
  void bring(long lines) {
    for (; lines > 0 && key_ < end_; lines--) {
      prefetch_l2(k_ + at_);
      prefetch_l2(v_ + at_);
      if ((at_ += 64) >= l_.head_dim * size_) key_++, find();
    }
  }

 private:
  void find() {
    if (key_ >= end_) return;
    k_ = (const char*)l_.k_cache + (l_.k_place(table_, key_) + head_ * l_.k_head) * size_;
    v_ = (const char*)l_.v_cache + (l_.v_place(table_, key_) + head_ * l_.v_head) * size_;
    at_ = 0;
  }
  const Layer& l_;
  const int* table_;
  const long size_ = l_.cache == kLikeActivations ? sizeof(bf16) : 1;  // bytes per element
  long head_, key_, end_, at_ = 0;  // at_: bytes of key_ already prefetched
  const char *k_ = nullptr, *v_ = nullptr;
};

// The rise of a row's maximum (as a power of two) above which earlier values are rescaled: probabilities up to 2^8 are
// as exact as those up to 1.
constexpr float kHeadroom = 8;

// Returns 2^(x / 256 - 127) of 32 integers x as bf16, with an rms error of 0.20 % (rounding alone has 0.17). x, an
// exponent and 8 bits of fraction f, is already a bf16 with one bit too many, except that the fraction must be 2^f - 1
// instead of f. The difference, up to 0.086, comes from a table of 64 entries.
inline __m512i exp2_fixed(__m512i x) {
  alignas(64) static const uint8_t kLess[64] = {1,  2,  3,  5,  5,  7,  8,  9,  10, 11, 11, 13, 13, 14, 15, 16,
                                                16, 17, 18, 18, 19, 19, 20, 20, 21, 21, 21, 22, 22, 22, 22, 22,
                                                22, 23, 23, 22, 22, 22, 22, 22, 22, 21, 21, 20, 20, 20, 19, 18,
                                                18, 17, 16, 16, 14, 14, 13, 12, 10, 10, 8,  7,  6,  4,  3,  2};
  const __m512i less =
      _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_srli_epi16(x, 2), _mm512_load_si512(kLess));
  return _mm512_avg_epu16(_mm512_subs_epu16(x, less), _mm512_setzero_si512());  // x / 2, rounded
}

// Converts one row of scores, N vectors, to bf16 probabilities in place, in the order 0 .. 3, 16 .. 19, 4 .. 7, 20 ..
// 23 and so on of each 32 keys. Columns outside [lo, hi) are masked. Updates the row's maximum m and sum. Returns the
// factor by which the row's earlier values must be multiplied.
template <int N>
inline float softmax_row(const Layer& l, float* row, long lo, long hi, float* m, float* sum) {
  bf16* p = (bf16*)row;
  vf x[N];
  float scale = l.scale * kLog2e, correction = 1.f;
  for (int i = 0; i < N; i++) x[i] = load(row + i * 16);
  if (l.soft_cap > 0) {
    for (int i = 0; i < N; i++) x[i] = tanh(x[i] * set1(l.scale / l.soft_cap)) * set1(l.soft_cap);
    scale = kLog2e;
  }
  if (lo > 0 || hi < N * 16)  // mask with a finite score that becomes 0
    for (int i = 0; i < N; i++)
      x[i] = select_range(x[i], int(std::max(lo - i * 16, 0L)), int(std::min(hi - i * 16, 16L)), set1(kUnseen));
  vf top = x[0], total = load(sum);
  for (int i = 1; i < N; i++) top = max(top, x[i]);
  if (_mm512_cmp_ps_mask(top.v, set1((*m + kHeadroom) / scale).v, _CMP_NLE_UQ)) {  // true at first: m is -inf
    const float highest = reduce_max(top), now = highest * scale;
    if (highest == kUnseen || !std::isfinite(highest)) {
      const __m512i all = _mm512_set1_epi16(highest == kUnseen ? 0 : 0x7fc0);  // NaN
      for (int i = 0; i < N; i += 2) _mm512_store_si512(p + i * 16, all);
      return 1.f;
    }
    correction = *m == kNegInf ? 0.f : std::exp2(*m - now);
    total = total * set1(correction);
    *m = now;
  }
  const vf by = set1(scale * 256), plus = set1((127 - *m) * 256), ones = {(__m512)_mm512_set1_epi16(0x3f80)};
  for (int i = 0; i < N; i += 2) {  // saturating: values that are too small become 0
    const __m512i e = exp2_fixed(
        _mm512_packus_epi32(_mm512_cvtps_epi32(fma(x[i], by, plus).v), _mm512_cvtps_epi32(fma(x[i + 1], by, plus).v)));
    total = {_mm512_dpbf16_ps(total.v, (__m512bh)e, (__m512bh)ones.v)};
    _mm512_store_si512(p + i * 16, e);
  }
  store(sum, total);
  return correction;
}

inline float softmax_row(const Layer& l, float* row, int columns, long lo, long hi, float* m, float* sum) {
  if (columns == 128) return softmax_row<8>(l, row, lo, hi, m, sum);
  if (columns == 96) return softmax_row<6>(l, row, lo, hi, m, sum);
  if (columns == 64) return softmax_row<4>(l, row, lo, hi, m, sum);
  return softmax_row<2>(l, row, lo, hi, m, sum);
}

// Returns the first 16 elements of row r of the output o, [rows / 32][dv / 32][2 x 2 tiles][16][16]. Elements c .. c +
// 15 are at flash_offset(c) from there.
inline float* flash_row(float* o, int r, long dv) { return o + r / 32 * 32 * dv + r % 32 / 16 * 512 + r % 16 * 16; }
inline long flash_offset(long c) { return c / 32 * 1024 + c % 32 / 16 * 256; }

// Runs a task of one KV head. slots[token] is the slot of the token's partial result.
void attend_flash(const Step& s, const Task& t, const Partials& partials, const long* slots, char* memory) {
  const Layer& l = s.layer;
  const long d = l.head_dim, dv = l.v_dim, steps = d / 32;
  const int g = s.group(), used = t.count * g, rows = (used + 31) / 32 * 32;
  // Cache lines of the next keys to prefetch per row. With few rows, the prefetch takes as long as the computation.
  const long lines_per_row = (kKeys * d / 32 + used - 1) / used;
  FlashScratch f(memory, rows, d, dv);
  auto token = [&](int r) { return t.tokens[std::min(r, used - 1) / g]; };
  std::fill(f.m, f.m + rows, kNegInf);
  std::fill(f.l, f.l + rows * 16, 0.f);
  if (t.resume) {
    std::fill(f.o + rows / 32 * 32 * dv - 32 * dv, f.o + rows * dv, 0.f);  // the last rows may be unused
    for (int r = 0; r < used; r++) {
      const Partial from = partials.at(slots[token(r)], t.h0 * g + r % g);
      for (long c = 0; c < dv; c += 16) store(flash_row(f.o, r, dv) + flash_offset(c), load(from.acc + c));
      store(f.l + r * 16, load(from.l));
      f.m[r] = *from.m;
    }
  }
  gather_queries(s, t, rows, f.q);
  std::vector<bool> started(rows / 32, t.resume);
  for (long key = t.begin / kKeys * kKeys; key < t.end; key += kKeys) {
    const int n = int(std::min(long(kKeys), (t.end - key + 31) / 32 * 32));
    pack_keys(l, t.table, t.h0, key, n, t.begin, t.end, f.k, f.v);
    KeysAhead ahead(l, t.table, t.h0, key + n, std::min(key + n + kKeys, t.end));
    for (int r0 = 0; r0 < rows; r0 += 32) {
      // For tokens of one request. Tokens of several requests all see all of [begin, end).
      const long low = s.position[token(r0)], high = s.position[token(r0 + 31)];
      if (key > high || s.first_key(low) >= key + n) continue;
      const int columns = int(std::min(long(n), (high + 1 - key + 31) / 32 * 32));
      for (int c = 0; c < columns; c += 32) {
        TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
        amx_tiles_2x2(f.q + r0 * d, d, f.k + c * d, int(steps));
        TILE_STORE(0, f.s + c, kKeys * 4); TILE_STORE(1, f.s + c + 16, kKeys * 4);
        TILE_STORE(2, f.s + 16 * kKeys + c, kKeys * 4); TILE_STORE(3, f.s + 16 * kKeys + c + 16, kKeys * 4);
      }
      float* o = f.o + r0 * dv;
      // The other rows are undefined: a row of a product depends only on its own row.
      for (int r = 0; r < std::min(32, used - r0); r++) {
        ahead.bring(lines_per_row);
        const long position = s.position[token(r0 + r)];
        const float correction = softmax_row(l, f.s + r * kKeys, columns, s.first_key(position) - key,
                                             position + 1 - key, f.m + r0 + r, f.l + (r0 + r) * 16);
        if (correction == 1.f || !started[r0 / 32]) continue;
        float* x = flash_row(o, r, dv);
        for (long c = 0; c < dv; c += 16) store(x + flash_offset(c), load(x + flash_offset(c)) * set1(correction));
      }
      for (long c = 0; c < dv / 32; c++) {
        float* x = o + c * 1024;
        if (started[r0 / 32]) {
          TILE_LOAD(0, x, 64);
          TILE_LOAD(1, x + 256, 64);
          TILE_LOAD(2, x + 512, 64);
          TILE_LOAD(3, x + 768, 64);
        } else {
          TILE_ZERO(0);
          TILE_ZERO(1);
          TILE_ZERO(2);
          TILE_ZERO(3);
        }
        amx_tiles_2x2((const bf16*)f.s, kKeys * 2, f.v + c * (kKeys / 32) * 2 * kTileElems, columns / 32);
        TILE_STORE(0, x, 64); TILE_STORE(1, x + 256, 64); TILE_STORE(2, x + 512, 64); TILE_STORE(3, x + 768, 64);
      }
      started[r0 / 32] = true;
    }
  }
  for (int r = 0; r < used; r++) {
    const float* x = flash_row(f.o, r, dv);
    if (t.keep) {
      const Partial to = partials.at(slots[token(r)], t.h0 * g + r % g);
      for (long c = 0; c < dv; c += 16) store(to.acc + c, load(x + flash_offset(c)));
      store(to.l, load(f.l + r * 16));
      *to.m = f.m[r];
      continue;
    }
    bf16* out = (bf16*)s.out + token(r) * s.ldo + (t.h0 * g + r % g) * dv;
    const float sum = l.with_sink(t.h0 * g + r % g, f.m[r], reduce_add(load(f.l + r * 16)));
    const vf inverse = set1(sum > 0 ? 1.f / sum : 0.f);
    for (long c = 0; c < dv; c += 16) store(out + c, load(x + flash_offset(c)) * inverse);
  }
}

}  // namespace
#endif
