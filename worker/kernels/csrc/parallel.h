// What the parallel regions share: a queue of pieces of work, and memory that a thread keeps.
#pragma once

#include <atomic>
#include <cstdlib>

// Work is handed out in small pieces, front to back, so that a thread that the machine takes away for a while does not hold up the others.
struct Queue {
  std::atomic<long> next{0};
  long end;
  explicit Queue(long n) : end(n) {}
  bool take(long& i) { return (i = next.fetch_add(1, std::memory_order_relaxed)) < end; }
};

struct Scratch {  // per thread, grows, lives as long as the thread
  void* p = nullptr;
  size_t size = 0;
  void* get(size_t bytes) {
    if (bytes > size) {
      free(p);
      size = (bytes + 4095) / 4096 * 4096;
      p = aligned_alloc(4096, size);
    }
    return p;
  }
  ~Scratch() { free(p); }
};
