// What LoRA adapters add to the products of linear layers, for the rows of a step that have one.
#pragma once

#include <cstdint>

#include "simd.h"

// Rows of a layer's output that are rows of one module of the adapter.
struct LoraPart {
  const void* b;     // [ceil(columns / 32)][rank][32], padded with zeros
  long first, rank;  // its entries of the product with A
  long columns;
  long at, step;     // its column i is column at + i / 16 * step + i % 16 of the output
};

struct LoraTiles;  // lora_tiles.h

// An adapter's matrices for one layer. a = null: none.
struct LoraMatrices {
  const void* a;  // [rank, k], padded with zeros to multiples of 4 and 32
  long rank, k;
  const LoraPart* parts;
  long num_parts;
  const LoraTiles* tiles;  // null: none
};

// The rows of a step that use one adapter, ascending. A row may have several adapters.
struct LoraRows {
  const int64_t* rows;
  const float* scales;  // null: all 1
  long count;
  const LoraMatrices* layers;
};

// The adapters' share in rows [begin, end) of a step, of the layer with the number `layer` in `LoraRows::layers`.
struct LoraStep {
  const LoraRows* groups;
  long count, layer, begin, end;
  bool untiled = false;  // only of adapters without tiles: a LoraSums adds the others

  LoraStep of(long number) const { return {groups, count, number, begin, end, untiled}; }
  LoraStep rows(long first, long last) const { return {groups, count, layer, first, last, untiled}; }
  LoraStep rest() const { return {groups, count, layer, begin, end, true}; }
  bool takes(const LoraMatrices& m) const { return m.a && !(untiled && m.tiles); }
  // Whether it adds anything.
  bool applies() const;
};

// Adds to out [end - begin, ..] what the adapters say about x [end - begin, k]. The sums of a row have one order,
// whatever the other rows.
template <typename T, typename O>
void add_lora(const LoraStep& step, const T* x, long ldx, O* out, long ldo);
