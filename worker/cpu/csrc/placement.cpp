// How well memory suits a core's L2 cache. Which of its sets a page may use is decided by the page's physical address, which nobody can choose: a program gets pages
// from the system, and a virtual machine from its host, whose pages are small and, if several threads asked for memory at once, perhaps every second or fourth in a row.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels.h"

namespace {

constexpr long kLine = 64, kSmall = 256 << 10, kStretch = 1 << 20;  // bytes; kSmall is in L2 wherever it lies

// Nanoseconds of an access that waits for the one before it, to all lines in random order: the least of several rounds. Overwrites them.
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
    asm volatile("" ::"r"(at));  // it is wanted
    least = std::min(least, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / double(order.size()));
  }
  return least;
}

}  // namespace

// How much longer an access to the worst of about `bytes` / 1 MiB stretches of memory takes than one to a small part of it: 1.3 at most where each can be in L2 as a
// whole (more of the small part is in L1). The memory is zeros then.
double cache_conflicts(char* memory, long bytes) {
  const long stretches = std::max(1L, (bytes + kStretch / 2) / kStretch), each = bytes / stretches / kLine * kLine;
  const double small = access_time(memory, std::min(each, kSmall));
  double worst = small;
  for (long i = 0; i < stretches; i++) worst = std::max(worst, access_time(memory + i * each, each));
  memset(memory, 0, bytes);
  return worst / small;
}
