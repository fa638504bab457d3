// Which keys several requests of a step share: prefix caching lets their block tables begin with the same blocks. What is shared is attended by all its requests
// at once (https://arxiv.org/abs/2402.05099), then each goes on with its own keys.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace {

// Keys [begin, end), the same for all tokens of these requests. Bounds are multiples of kSplit. Level 0 begins at key 0; a group within a group goes on, one
// level up, where that ends. Where each `step` keys have partial results of their own, the first ones are a token's slot number `slot`.
struct SharedKeys {
  std::vector<int> requests;
  long begin, end;
  int level;
  long step, slot;
  long slots() const { return (end - begin + step - 1) / step; }
};

class SharedPrefixes {
 public:
  // Among `requests`, those that share at least kSplit keys, where their tokens together are at least `min_tokens`. max_parts: that shared keys are cut in.
  SharedPrefixes(const Step& s, std::vector<int> requests, long min_tokens, long max_parts)
      : s_(s), min_tokens_(min_tokens), max_parts_(max_parts), own_begin_(s.num_requests, 0), slots_(s.num_requests, 0) {
    find(requests.data(), requests.data() + requests.size(), 0, 0);
  }
  const std::vector<SharedKeys>& found() const { return found_; }
  long own_begin(long i) const { return own_begin_[i]; }  // the first key of request i that it does not share
  long slots(long i) const { return slots_[i]; }          // of those before

 private:
  // All of [first, last) have the same keys before `begin`.
  void find(int* first, int* last, long begin, int level) {
    last = std::partition(first, last, [&](int i) { return s_.context_len(i) >= begin + kSplit; });
    const long block = begin / s_.layer.block_size, blocks = (begin + kSplit - 1) / s_.layer.block_size + 1 - block;
    std::sort(first, last, [&](int a, int b) { return std::make_pair(s_.table(a)[block], a) < std::make_pair(s_.table(b)[block], b); });
    while (first < last) {
      const int* with = s_.table(*first) + block;
      int* other = std::find_if(first + 1, last, [&](int i) { return s_.table(i)[block] != *with; });
      int* end = std::partition(first + 1, other, [&](int i) { return std::equal(with, with + blocks, s_.table(i) + block); });
      if (end - first >= 2) add(first, end, begin, level);
      first = end;
    }
  }

  // [first, last) share the keys begin .. begin + kSplit - 1, at least.
  void add(int* first, int* last, long begin, int level) {
    long tokens = 0, keys = s_.context_len(*first);
    for (int* i = first; i < last; i++) tokens += s_.query_len(*i), keys = std::min(keys, s_.context_len(*i));
    if (tokens < min_tokens_) return;
    const long size = s_.layer.block_size;
    const int* with = s_.table(*first);
    for (int* i = first + 1; i < last; i++) {
      const long from = begin / size, same = std::mismatch(with + from, with + (keys + size - 1) / size, s_.table(*i) + from).first - with;
      keys = std::min(keys, same * size);
    }
    keys = keys / kSplit * kSplit;
    const long splits = (keys - begin) / kSplit, step = (splits + max_parts_ - 1) / max_parts_ * kSplit;
    found_.push_back({std::vector<int>(first, last), begin, keys, level, step, slots_[*first]});
    for (int* i = first; i < last; i++) own_begin_[*i] = keys, slots_[*i] += found_.back().slots();
    find(first, last, keys, level + 1);
  }

  const Step& s_;
  const long min_tokens_, max_parts_;
  std::vector<SharedKeys> found_;
  std::vector<long> own_begin_, slots_;
};

}  // namespace
