// Mixers with a state: what is between the projections of a layer, in one call.
#pragma once

#include "simd.h"

// The requests of a step: request i has tokens starts[i] : starts[i + 1], reads page read[i] unless it is fresh, and
// writes page write[i].
struct StateStep {
  const long *read, *write;
  const bool* fresh;
  const int* starts;
  long num_requests;
};

// The projections of a token are [B, C, x] (kShortConv), or q, k, v, z and, at column `gates`, the gates of beta and of
// the decay (kDelta). The twins are worker/transformer/mixers/short_conv.py and delta.py.
struct StateMixer {
  enum Kind : long { kShortConv, kDelta };
  long kind;
  const float *conv, *conv_bias;  // [width, channels], [channels] or null
  float* conv_pages;              // [.., width - 1, channels]
  long channels, width;
  float* state_pages;                   // [.., heads, dk, dv]; this and the rest: of a delta net
  const float *a_log, *dt_bias, *norm;  // [heads], [heads], [dv]
  long heads, k_heads, dk, dv, gates;
  long tiled;  // key head i belongs to the value heads i + n k_heads; otherwise to consecutive ones
  float query_length, strength, eps;
};

extern "C" {
// projected [T, ..], row stride ld; out [T, channels or heads dv], row stride ldo.
void quire_mix(const StateMixer* m, const StateStep* step, const bf16* projected, long ld, bf16* out, long ldo);
}
