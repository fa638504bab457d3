// Finds the keys that several requests of a step share: with prefix caching, their block tables begin with the same
// blocks. All these requests attend to the shared keys at once (https://arxiv.org/abs/2402.05099); then each continues
// with its own keys.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace {

// Keys [begin, end) that all tokens of these requests share. Bounds are multiples of kSplit. Level 0 begins at key 0; a
// subgroup of a group is one level higher and begins at the end of that group.
struct SharedKeys {
  std::vector<int> requests;
  long begin, end;
  int level;
};

class SharedPrefixes {
 public:
  // Finds the groups among `requests` that share at least kSplit keys and have at least `min_tokens` tokens in total.
  SharedPrefixes(const Step& s, std::vector<int> requests, long min_tokens)
      : s_(s), min_tokens_(min_tokens), own_begin_(s.num_requests, 0) {
    find(requests.data(), requests.data() + requests.size(), 0, 0);
  }
  const std::vector<SharedKeys>& found() const { return found_; }
  long own_begin(long i) const { return own_begin_[i]; }  // the first key that request i does not share

 private:
  // Finds the groups in [first, last), whose keys before `begin` are the same.
  void find(int* first, int* last, long begin, int level) {
    last = std::partition(first, last, [&](int i) { return s_.context_len(i) >= begin + kSplit; });
    const long block = begin / s_.layer.block_size, blocks = (begin + kSplit - 1) / s_.layer.block_size + 1 - block;
    std::sort(first, last, [&](int a, int b) {
      return std::make_pair(s_.table(a)[block], a) < std::make_pair(s_.table(b)[block], b);
    });
    while (first < last) {
      const int* with = s_.table(*first) + block;
      int* other = std::find_if(first + 1, last, [&](int i) { return s_.table(i)[block] != *with; });
      int* end =
          std::partition(first + 1, other, [&](int i) { return std::equal(with, with + blocks, s_.table(i) + block); });
      if (end - first >= 2) add(first, end, begin, level);
      first = end;
    }
  }

  // Adds the group [first, last), which shares at least the keys begin .. begin + kSplit - 1, and its subgroups.
  void add(int* first, int* last, long begin, int level) {
    long tokens = 0, keys = s_.context_len(*first);
    for (int* i = first; i < last; i++) tokens += s_.query_len(*i), keys = std::min(keys, s_.context_len(*i));
    if (tokens < min_tokens_) return;
    const long size = s_.layer.block_size;
    const int* with = s_.table(*first);
    for (int* i = first + 1; i < last; i++) {
      const long from = begin / size,
                 same = std::mismatch(with + from, with + (keys + size - 1) / size, s_.table(*i) + from).first - with;
      keys = std::min(keys, same * size);
    }
    keys = keys / kSplit * kSplit;
    found_.push_back({std::vector<int>(first, last), begin, keys, level});
    for (int* i = first; i < last; i++) own_begin_[*i] = keys;
    find(first, last, keys, level + 1);
  }

  const Step& s_;
  const long min_tokens_;
  std::vector<SharedKeys> found_;
  std::vector<long> own_begin_;
};

}  // namespace
