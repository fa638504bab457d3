// Packs weights in the blocks of GGUF files for the kernels of quantized weights (quant.h), in the same number of bits and
// without loss.
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "quant_pack.h"

namespace {

// The layouts of blocks that are packed; numbered as in worker/cpu/ops.py.
enum Layout { kQ4_0, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kMxfp4, kLayouts };

struct Source {
  Layout layout;
  int values, bytes;  // of a block
};
constexpr Source kSources[kLayouts] = {{kQ4_0, 32, 18}, {kQ8_0, 32, 34}, {kQ4_K, 256, 144}, {kQ5_K, 256, 176}, {kQ6_K, 256, 210}, {kMxfp4, 32, 17}};

inline void halves(const uint8_t* q, uint8_t* codes) {
  for (int i = 0; i < 16; i++) codes[i] = q[i] & 15, codes[i + 16] = q[i] >> 4;
}

void pairs_of_groups(const uint8_t* q, uint8_t* codes) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) codes[64 * j + i] = q[32 * j + i] & 15, codes[64 * j + 32 + i] = q[32 * j + i] >> 4;
}

// The codes of a block, in the order of k.
void codes_in(Layout layout, const uint8_t* b, uint8_t* codes) {
  switch (layout) {
    case kQ4_0: return halves(b + 2, codes);
    case kMxfp4: return halves(b + 1, codes);
    case kQ8_0:
      for (int i = 0; i < 32; i++) codes[i] = uint8_t(b[2 + i] ^ 0x80);
      return;
    case kQ4_K: return pairs_of_groups(b + 16, codes);
    case kQ5_K:
      pairs_of_groups(b + 48, codes);
      for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) codes[32 * j + i] = uint8_t(codes[32 * j + i] | (b[16 + i] >> j & 1) << 4);
      return;
    default:  // kQ6_K
      for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
          const uint8_t first = b[64 * half + i], second = b[64 * half + 32 + i], high = b[128 + 32 * half + i];
          uint8_t* to = codes + 128 * half + i;
          to[0] = uint8_t((first & 15) | (high & 3) << 4), to[32] = uint8_t((second & 15) | (high >> 2 & 3) << 4);
          to[64] = uint8_t(first >> 4 | (high >> 4 & 3) << 4), to[96] = uint8_t(second >> 4 | high >> 6 << 4);
        }
  }
}

// Writes the scales of a block, whose first k is `k`, for column `column` of block nb.
void put_scales(const Quant& q, Layout layout, const uint8_t* b, int nb, int column, int k) {
  if (layout == kQ4_0 || layout == kQ8_0) memcpy((f16*)q.scales + q.group_at(nb, k) + column, b, 2);
  if (layout == kMxfp4) ((uint8_t*)q.scales)[q.group_at(nb, k) + column] = b[0];
  if (!is_super_kind(q.kind)) return;
  uint8_t* super = q.super(nb, k / 256);
  const int tile = column / 16, lane = column % 16 * 4;
  memcpy(super + column * 2, layout == kQ6_K ? b + 208 : b, 2);
  if (layout == kQ6_K) {
    for (int i = 0; i < 4; i++) memcpy(super + 64 + tile * 256 + i * 64 + lane, b + 192 + i * 4, 4);
  } else {
    memcpy(super + 64 + column * 2, b + 2, 2);
    for (int i = 0; i < 3; i++) memcpy(super + 128 + tile * 192 + i * 64 + lane, b + 4 + i * 4, 4);
  }
}

thread_local Scratch scratch;

}  // namespace

extern "C" {

// Packs rows of blocks, `counts[i]` of them at parts[i] one after another, into q, whose scales are zero. k: values of a
// row, whole blocks. gated: as in quire_gemm_pack.
void quire_pack_blocks(const uint8_t** parts, const long* counts, long num_parts, int layout, const Quant* q, long n, long k, int gated) {
  const Source source = kSources[layout];
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
        codes_in(source.layout, block, codes + c * ld + at);
        put_scales(*q, source.layout, block, nb, column, int(at));
      }
    }
    pack_columns((uint8_t*)q->data, q->bits(), q->k_steps, tile / 2, int(tile % 2), codes);
  });
}
}
