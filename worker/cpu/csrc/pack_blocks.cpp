// Packs weights in the blocks of GGUF files for the kernels of quantized weights (quant.h), in the same number of bits
// and without loss.
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "quant_pack.h"

namespace {

// The layouts of blocks; numbered as in worker/cpu/ops.py.
enum class Layout { Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, Q4_1, Q5_0, Q5_1, IQ4_NL, IQ4_XS, Q2_K, Q3_K };

struct Source {
  int values, bytes;     // of a block
  int scale, codes = 0;  // where the scale (or d, then dmin), and the codes' lower bits begin
  int upper = 0;         // where their upper bits begin
  int integers = 0;      // where the integer scales of groups begin
};
constexpr Source kSources[] = {{32, 18, 0, 2},
                               {32, 34, 0, 2},
                               {256, 144, 0, 16, 0, 4},
                               {256, 176, 0, 48, 16, 4},
                               {256, 210, 208, 0, 128, 192},
                               {32, 17, 0, 1},
                               {32, 20, 0, 4},
                               {32, 22, 0, 6, 2},
                               {32, 24, 0, 8, 4},
                               {32, 18, 0, 2},
                               {256, 136, 0, 8, 0, 2},
                               {256, 84, 80, 16, 0, 0},
                               {256, 110, 108, 32, 0, 96}};

inline void halves(const uint8_t* q, uint8_t* codes) {
  uint64_t two[2];
  memcpy(two, q, 16);
  for (int i = 0; i < 2; i++) {
    const uint64_t low = two[i] & 0x0f0f0f0f0f0f0f0f, high = two[i] >> 4 & 0x0f0f0f0f0f0f0f0f;
    memcpy(codes + i * 8, &low, 8), memcpy(codes + 16 + i * 8, &high, 8);
  }
}
// Puts bit i into bit 4 of byte i.
inline uint64_t fifth_bits(uint8_t bits) {
  const uint64_t one_a_byte = bits * 0x0101010101010101u & 0x8040201008040201u;
  return (one_a_byte + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
}
inline void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
  for (int i = 0; i < 4; i++) {
    uint64_t eight;
    memcpy(&eight, codes + 8 * i, 8);
    eight |= fifth_bits(bits[i]);
    memcpy(codes + 8 * i, &eight, 8);
  }
}
void pairs_of_groups(const uint8_t* q, uint8_t* codes) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) codes[64 * j + i] = q[32 * j + i] & 15, codes[64 * j + 32 + i] = q[32 * j + i] >> 4;
}
void quarters(const uint8_t* q, uint8_t* codes) {
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 32; i++) codes[32 * j + i] = q[j / 4 * 32 + i] >> j % 4 * 2 & 3;
}
// Adds bit j of byte i to the code i of each 32.
void add_bits_of(const uint8_t* bits, int shift, uint8_t* codes) {
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 32; i++) codes[32 * j + i] = uint8_t(codes[32 * j + i] | (bits[i] >> j & 1) << shift);
}

// The codes of a block, in the order of k.
void codes_in(Layout layout, const uint8_t* b, uint8_t* codes) {
  const Source& at = kSources[int(layout)];
  switch (layout) {
    case Layout::Q4_0: case Layout::Q4_1: case Layout::IQ4_NL: case Layout::MXFP4: return halves(b + at.codes, codes);
    case Layout::Q5_0: case Layout::Q5_1: return halves(b + at.codes, codes), add_fifth_bits(b + at.upper, codes);
    case Layout::Q8_0:
      for (int i = 0; i < 32; i++) codes[i] = uint8_t(b[at.codes + i] ^ 0x80);
      return;
    case Layout::IQ4_XS:
      for (int j = 0; j < 8; j++) halves(b + at.codes + 16 * j, codes + 32 * j);
      return;
    case Layout::Q2_K: return quarters(b + at.codes, codes);
    case Layout::Q3_K: return quarters(b + at.codes, codes), add_bits_of(b + at.upper, 2, codes);
    case Layout::Q4_K: return pairs_of_groups(b + at.codes, codes);
    case Layout::Q5_K: return pairs_of_groups(b + at.codes, codes), add_bits_of(b + at.upper, 4, codes);
    case Layout::Q6_K:
      for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
          const uint8_t first = b[64 * half + i], second = b[64 * half + 32 + i], high = b[at.upper + 32 * half + i];
          uint8_t* to = codes + 128 * half + i;
          to[0] = uint8_t((first & 15) | (high & 3) << 4), to[32] = uint8_t((second & 15) | (high >> 2 & 3) << 4);
          to[64] = uint8_t(first >> 4 | (high >> 4 & 3) << 4), to[96] = uint8_t(second >> 4 | high >> 6 << 4);
        }
  }
}

// Writes the scales of a block, whose first k is `k`, for column `column` of block nb.
void put_scales(const Quant& q, Layout layout, const uint8_t* b, int nb, int column, int k) {
  const Source& at = kSources[int(layout)];
  const KindTraits& kind = kKinds[q.kind];
  if (kind.super) {
    const int heads = kind.offsets ? 128 : 64, size = (kind.super - heads) / 32;  // bytes of a column
    uint8_t *super = q.super(nb, k / 256), *tile = super + heads + column / 16 * size * 16 + column % 16 * 4;
    memcpy(super + column * 2, b + at.scale, 2);
    if (kind.offsets) memcpy(super + 64 + column * 2, b + at.scale + 2, 2);
    if (layout == Layout::IQ4_XS) {  // in the file the upper bits come first
      memcpy(tile, b + at.integers + 2, 4), memcpy(tile + 64 - column % 16 * 2, b + at.integers, 2);
      return;
    }
    for (int i = 0; i < size / 4; i++) memcpy(tile + i * 64, b + at.integers + i * 4, 4);
    return;
  }
  const long place = q.group_at(nb, k) + column;
  if (layout == Layout::MXFP4) ((uint8_t*)q.scales)[place] = b[at.scale];
  else memcpy((f16*)q.scales + place, b + at.scale, 2);
  if (kind.offsets) memcpy((f16*)q.offsets + place, b + at.scale + 2, 2);
}

thread_local Scratch scratch;

}  // namespace

extern "C" {

// Packs rows of blocks, `counts[i]` of them at parts[i] one after another, into q, whose scales and offsets are zero.
// k: values of a row, whole blocks. gated: as in quire_gemm_pack.
void quire_pack_blocks(const uint8_t** parts, const long* counts, long num_parts, int layout, const Quant* q, long n,
                       long k, int gated) {
  const Source& source = kSources[layout];
  const long row_bytes = k / source.values * source.bytes, ld = long(q->k_steps) * 64;
  std::vector<const uint8_t*> rows;
  for (long i = 0; i < num_parts; i++)
    for (long r = 0; r < counts[i]; r++) rows.push_back(parts[i] + r * row_bytes);
  parallel_for(quire_gemm_packed_columns(n, gated) / 16, 2, [&](long tile) {
    uint8_t* codes = (uint8_t*)scratch.get(ld * 16);
    memset(codes, q->kind == kFloats4 ? 0 : q->zero_point(), ld * 16);
    for (int c = 0; c < 16; c++) {
      const long row = source_column(tile * 16 + c, n, gated);
      if (row < 0 || row >= long(rows.size())) continue;
      const int nb = int(tile / 2), column = int(tile % 2) * 16 + c;
      for (long at = 0; at < k; at += source.values) {
        const uint8_t* block = rows[row] + at / source.values * source.bytes;
        codes_in(Layout(layout), block, codes + c * ld + at);
        put_scales(*q, Layout(layout), block, nb, column, int(at));
      }
    }
    pack_columns((uint8_t*)q->data, q->bits(), q->k_steps, tile / 2, int(tile % 2), codes);
  });
}
}
