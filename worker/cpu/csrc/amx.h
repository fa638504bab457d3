// AMX tiles through inline assembly that tells the compiler about memory.
//
// The intrinsics of the compilers we support do not: GCC 12's `_tile_loadd` has no memory clobber and `_tile_loadconfig` claims to read 8 bytes, so
// stores that fill a tile's source may be moved behind the load or dropped.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define QUIRE_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "simd.h"

// Linux hands out the tile registers' state only to a process that asked for it, once. False where it refuses.
static inline bool amx_permitted() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
  return granted;
}

#define TILE_LOAD(t, p, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_LOAD_FAR(t, p, stride) asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(p), "r"((long)(stride)) : "memory")  // leaves L1 to others
#define TILE_STORE(t, p, stride) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_DP_SU(c, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DP_SS(c, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DP(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Configures this thread's tiles while it lives. Tiles 0, 1 are accumulators of `rows` x `columns` dwords and 2, 3 of `lower` rows (default: as many); 4 and 5 the
// left operands of these, `bytes` wide; 6 and 7 right operands of `bytes` / 4 rows. Released at the end, so that a library that configures tiles itself finds them
// in their initial state.
struct TileScope {
  explicit TileScope(int rows = 16, int bytes = 64, int lower = 0, int columns = 16) {
    struct alignas(64) { uint8_t palette = 1, start_row = 0, zero[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } config;
    for (int t = 0; t < 8; t++) {
      config.bytes[t] = uint16_t(t == 4 || t == 5 ? bytes : columns * 4);
      config.rows[t] = uint8_t(t >= 6 ? bytes / 4 : (t == 2 || t == 3 || t == 5) && lower ? lower : rows);
    }
    asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");
  }
  ~TileScope() { asm volatile("tilerelease" ::); }
  TileScope(const TileScope&) = delete;
};

// On Sapphire Rapids a tile store that comes 600 ns and more after the one before takes 200 ns, in which nothing else goes on. So long loops store a tile that
// nobody wants every so many k-steps of 32, more often where these wait for memory.
constexpr int kKeepAwake = 8, kKeepAwakeFromMemory = 2;

// Tiles 0, 1 (rows 0..15) and 2, 3 (rows 16..31) += A B over `steps` k-steps of 32, for 32 rows and 32 columns. A are rows `lda` apart, B is a sequence of k-steps
// of two 1 KiB tiles: columns 0..15, then 16..31, each as 16 rows of 16 columns x 2 consecutive k.
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

// The same where one B meets many A: the first `hot` k-steps of B are to stay in L1, all else comes from L2 and leaves L1 alone. aside(step) is called in each, for
// work of the vector units while AMX multiplies. `spare`: 1 KiB.
template <typename F>
static inline void amx_tiles_2x2_streaming(const bf16* a, long lda, const bf16* b, int steps, int hot, void* spare, F&& aside) {
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
