// Excludes the tokens that grammars do not allow. The twin is `Ops.exclude_by_bitmask` in worker/platforms/ops.py.
#include <algorithm>
#include <limits>

#include "parallel.h"

extern "C" {

// Sets logits[rows[i], t] to -inf where bit t of masks[i] is 0, for the tokens t of a vocabulary of n. The lowest bit
// of a word is its first token; ld_masks words are a row of masks.
void quire_exclude_by_bitmask(float* logits, long ld_logits, long n, const long* rows, const int* masks, long ld_masks,
                              long num_rows) {
  constexpr float kExcluded = -std::numeric_limits<float>::infinity();
  constexpr long kWords = 512;  // of one piece of work: 64 KB of logits
  const long pieces = (ld_masks + kWords - 1) / kWords;
  parallel_for(num_rows * pieces, 1, [&](long piece) {
    const long i = piece / pieces, first = piece % pieces * kWords, last = std::min(ld_masks, first + kWords);
    float* row = logits + rows[i] * ld_logits;
    for (long w = first; w < last; w++) {
      const unsigned allowed = (unsigned)masks[i * ld_masks + w];
      if (allowed == ~0u) continue;
      const long count = std::min(32L, n - 32 * w);
      float* p = row + 32 * w;
      if (allowed == 0)
        std::fill(p, p + count, kExcluded);
      else
        for (long t = 0; t < count; t++) p[t] = allowed >> t & 1 ? p[t] : kExcluded;
    }
  });
}
}
