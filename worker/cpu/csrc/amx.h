// AMX tiles through inline assembly with memory clobbers.
//
// The intrinsics of the supported compilers lack them: GCC 12's `_tile_loadd` has no memory clobber and
// `_tile_loadconfig` claims to read 8 bytes, so stores that fill a tile's source may be moved after the load or
// dropped.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define QUIRE_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "simd.h"

// Requests the tile registers from Linux, once per process. Returns false if the kernel refuses.
static inline bool amx_permitted() {
  static const bool granted =
      syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
  return granted;
}

#define TILE_LOAD(t, p, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((long)(stride)) : "memory")
// Does not fill L1
#define TILE_LOAD_FAR(t, p, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_DP_SU(c, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DP_SS(c, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DP(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Configures this thread's tiles for the lifetime of the object. Tiles 0 and 1 are accumulators of `rows` x `columns`
// dwords, 2 and 3 accumulators of `lower` rows (default: `rows`); 4 and 5 are their left operands, `bytes` wide; 6 and
// 7 are right operands of `bytes` / 4 rows. The destructor releases the tiles, so that a library that configures tiles
// itself finds them in their initial state.
struct TileScope {
  explicit TileScope(int rows = 16, int bytes = 64, int lower = 0, int columns = 16) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, zero[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; t++) {
      config.bytes[t] = uint16_t(t == 4 || t == 5 ? bytes : columns * 4);
      config.rows[t] = uint8_t(t >= 6 ? bytes / 4 : (t == 2 || t == 3 || t == 5) && lower ? lower : rows);
    }
    asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");
  }
  ~TileScope() { asm volatile("tilerelease" ::); }
  TileScope(const TileScope&) = delete;
};

// On Sapphire Rapids a tile store that comes 600 ns or more after the previous one stalls the core for 200 ns. Long
// loops therefore store an unused tile every few k-steps of 32, more often in loops that wait for memory.
constexpr int kKeepAwake = 8, kKeepAwakeFromMemory = 2;

// Adds A B over `steps` k-steps of 32 to tiles 0, 1 (rows 0..15) and 2, 3 (rows 16..31), for 32 rows and 32 columns.
// Rows of A are `lda` apart. B is a sequence of k-steps of two 1 KiB tiles: columns 0..15, then 16..31, each as 16 rows
// of 16 columns x 2 consecutive k.
static inline void amx_tiles_2x2(const bf16* a, long lda, const bf16* b, int steps) {
  const bf16* lower = a + 16 * lda;
  for (int s = 0; s < steps; s++, a += 32, lower += 32, b += 1024) {
    TILE_LOAD(4, a, lda * 2);
    TILE_LOAD(6, b, 64);
    TILE_DP(0, 4, 6);
    TILE_LOAD(7, b + 512, 64);
    TILE_DP(1, 4, 7);
    TILE_LOAD(5, lower, lda * 2);
    TILE_DP(2, 5, 6);
    TILE_DP(3, 5, 7);
  }
}

// Like amx_tiles_2x2, for one B that is multiplied by many A: the first `hot` k-steps of B stay in L1, everything else
// is loaded from L2 without filling L1. aside(step) is called in each step, for vector work while AMX multiplies.
// `spare`: 1 KiB.
template <typename F>
static inline void amx_tiles_2x2_streaming(const bf16* a, long lda, const bf16* b, int steps, int hot, void* spare,
                                           F&& aside) {
  const bf16* lower = a + 16 * lda;
  for (int s = 0; s < steps; s++, a += 32, lower += 32, b += 1024) {
    TILE_LOAD_FAR(4, a, lda * 2);
    if (s < hot) TILE_LOAD(6, b, 64);
    else TILE_LOAD_FAR(6, b, 64);
    TILE_DP(0, 4, 6);
    if (s < hot) TILE_LOAD(7, b + 512, 64);
    else TILE_LOAD_FAR(7, b + 512, 64);
    TILE_DP(1, 4, 7);
    TILE_LOAD_FAR(5, lower, lda * 2);
    TILE_DP(2, 5, 6);
    TILE_DP(3, 5, 7);
    if (s % kKeepAwake == 0) TILE_STORE(5, spare, 64);
    aside(s);
  }
}
#else
#define QUIRE_AMX 0
#endif
