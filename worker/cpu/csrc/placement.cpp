// Measures how well a piece of memory maps to a core's L2 cache. A page's physical address decides which cache sets it
// uses, and a program cannot choose that address: the kernel picks the page, and on a virtual machine the host does.
// Host pages are small and, if several threads allocated at once, may be only every second or fourth page of a run.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels.h"

namespace {

constexpr long kLine = 64, kSmall = 256 << 10, kStretch = 1 << 20;  // bytes; kSmall fits in L2 at any address

// Returns the latency in ns of dependent loads that visit all lines in random order: the minimum of several rounds.
// Overwrites the memory.
double access_time(char* memory, long bytes) {
  std::vector<long> order(bytes / kLine);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(0));
  for (size_t i = 0; i < order.size(); i++) {
    char* next = memory + order[(i + 1) % order.size()] * kLine;
    memcpy(memory + order[i] * kLine, &next, sizeof next);
  }
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < 4; round++) {
    const auto start = std::chrono::steady_clock::now();
    char* at = memory;
    for (size_t i = 0; i < order.size(); i++) memcpy(&at, at, sizeof at);
    asm volatile("" ::"r"(at));  // keep the loads
    least = std::min(least, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() /
                                double(order.size()));
  }
  return least;
}

}  // namespace

// Splits the memory into about `bytes` / 1 MiB stretches and returns the access time of the slowest, divided by that of
// a small part of it. The ratio is at most 1.3 if each stretch fits in L2 (it exceeds 1 because more of the small part
// is in L1). Zeroes the memory.
double cache_conflicts(char* memory, long bytes) {
  const long stretches = std::max(1L, (bytes + kStretch / 2) / kStretch), each = bytes / stretches / kLine * kLine;
  const double small = access_time(memory, std::min(each, kSmall));
  double worst = small;
  for (long i = 0; i < stretches; i++) worst = std::max(worst, access_time(memory + i * each, each));
  memset(memory, 0, bytes);
  return worst / small;
}
