// Blocks of 128 keys of a KV head and their values in the cache, and tiles of floats that are packed from them: 32 of k
// by 32 columns. The columns of a key tile are keys, those of a value tile are elements.
#pragma once

#include "attention.h"

namespace {

constexpr int kKeys = 128;

// Pointers to 128 keys of a KV head and their values in the cache. Keys outside the wanted range point to one inside
// it.
template <typename T>
struct KeyBlock {
  const T *k[kKeys], *v[kKeys];
  const int* table;       // block table of the keys
  long head, start;       // their KV head; position of the first wanted key
  int begin = 0, end = 0;  // the wanted keys
  int row = 0, line = 0;  // the next key, and the byte in it, to prefetch

  void locate(const Layer& l, const int* of_table, long of_head, long key, long first, long last) {
    table = of_table, head = of_head, start = std::max(key, first);
    long block = start / l.block_size, slot = start % l.block_size;
    const int lo = int(start - key);
    begin = lo, end = int(std::min(long(kKeys), last - key)), row = lo, line = 0;
    for (int j = lo; j < end; j++) {
      if (kScaled<T> && (j == lo || slot == 0)) {
        prefetch_l2(l.k_scales.at(table[block], slot, head));
        prefetch_l2(l.v_scales.at(table[block], slot, head));
      }
      k[j] = (const T*)l.k_cache + table[block] * l.k_block + slot * l.k_slot + head * l.k_head;
      v[j] = (const T*)l.v_cache + table[block] * l.v_block + slot * l.v_slot + head * l.v_head;
      if (++slot == l.block_size) slot = 0, block++;
    }
    std::fill(k, k + lo, k[lo]), std::fill(v, v + lo, v[lo]);
    std::fill(k + end, k + kKeys, k[end - 1]), std::fill(v + end, v + kKeys, v[end - 1]);
  }

  // Writes the scales of the keys [kKeys], 0 for those that are not wanted: what load() returns times the scale is the
  // number.
  void scales(const Layer& l, const Scales& of, float* to) const {
    std::fill(to, to + begin, 0.f), std::fill(to + end, to + kKeys, 0.f);
    long block = start / l.block_size, slot = start % l.block_size;
    for (int j = begin; j < end; slot = 0, block++) {
      const float* from = of.at(table[block], slot, head);
      const int n = int(std::min(long(end - j), l.block_size - slot));
      for (int i = 0; i < n; i++) to[j + i] = from[i * of.slot] * kLoadedPart<T>;
      j += n;
    }
  }

  // Prefetches the next `lines` cache lines of K and as many of V to L2. A key has `bytes` bytes.
  void fetch(int lines, int bytes) {
    if (row >= end) return;
    const char *at_k = (const char*)k[row] + line, *at_v = (const char*)v[row] + line;
    for (; lines > 0; lines--, at_k += 64, at_v += 64) {
      prefetch_l2(at_k);
      prefetch_l2(at_v);
      if ((line += 64) < bytes) continue;
      line = 0;
      if (++row >= end) return;
      at_k = (const char*)k[row] - 64, at_v = (const char*)v[row] - 64;
    }
  }
};

// Returns byte BYTE of each lane, in e4m3, as load() does. Its bits in the places of a float's are the number divided
// by 2^120.
template <int BYTE>
inline Floats e4m3_number(Ints x) {
  return Floats(signed_right<4>(left<24 - 8 * BYTE>(x)) & set1_ints(int(0x87f00000u))) * set1_floats(0x1p112f);
}

// Calls f(integral constant i, x) with x = k[0 .. kLanes - 1][c + i] for every i of a step, and returns the step's
// length: 2 * kLanes for bf16 and, with AVX-512, 4 * kLanes for e4m3 if that many elements remain, else 16.
template <typename T, typename F>
__attribute__((always_inline)) inline long transposed(const T* const* k, long c, long count, F&& f) {
  if constexpr (std::is_same_v<T, bf16>)
    if (c + 2 * kLanes <= count) {
      Ints r[kLanes];
      unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = load_ints(k[key] + c); });
      transpose(r);
      unrolled<kLanes>([&](auto p) __attribute__((always_inline)) {
        f(std::integral_constant<int, 2 * p>(), evens(r[p]));
        f(std::integral_constant<int, 2 * p + 1>(), odds(r[p]));
      });
      return 2 * kLanes;
    }
  if constexpr (std::is_same_v<T, e4m3> && kLanes == 16)
    if (c + 4 * kLanes <= count) {
      Ints r[kLanes];
      unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = load_ints(k[key] + c); });
      transpose(r);
      unrolled<kLanes>([&](auto p) __attribute__((always_inline)) {
        unrolled<4>([&](auto byte) __attribute__((always_inline)) {
          f(std::integral_constant<int, 4 * p + byte>(), e4m3_number<byte>(r[p]));
        });
      });
      return 4 * kLanes;
    }
  unrolled<16 / kLanes>([&](auto i) __attribute__((always_inline)) {
    Ints r[kLanes];
    unrolled<kLanes>([&](auto key) __attribute__((always_inline)) { r[key] = Ints(part(load(k[key] + c), i)); });
    transpose(r);
    unrolled<kLanes>(
        [&](auto p) __attribute__((always_inline)) { f(std::integral_constant<int, i * kLanes + p>(), Floats(r[p])); });
  });
  return 16;
}

// Packs elements [c, c + 32) of 32 keys with d elements each into a tile whose columns are keys.
template <typename T>
void pack_keys(const T* const* k, long c, long d, float* tile) {
  for (int j = 0; j < 32; j += kLanes)
    for (long at = c; at < std::min(c + 32, d);) {
      float* to = tile + (at - c) * 32 + j;
      at += transposed(k + j, at, d,
                       [&](auto i, Floats x) __attribute__((always_inline)) { store_floats(to + i * 32, x); });
    }
}

// The two scales of each of 128 keys that are latents, [kKeys] each; without them, null.
struct TwoScales {
  const float *first = nullptr, *second = nullptr;
};

// Multiplies the columns of a tile of elements [c, c + 32) of 32 keys by their scales: `first` for elements before
// `rank`, `second` for the others.
inline void scale_tile(float* tile, long c, long d, long rank, const float* first, const float* second) {
  for (long i = 0; i < std::min(32L, d - c); i++, tile += 32) {
    const float* by = c + i < rank ? first : second;
    for (int j = 0; j < 32; j += 16) store(tile + j, load(tile + j) * load(by + j));
  }
}

// Packs elements [c, c + 32) of 32 values into a tile whose columns are elements. Pads with zeros from d on.
template <typename T>
void pack_values(const T* const* v, long c, long d, float* tile) {
  for (int j = 0; j < 32; j++)
    for (int i = 0; i < 32; i += 16) store(tile + j * 32 + i, c + i < d ? load(v[j] + c + i) : zero());
}

}  // namespace
