// What the kernels need of a machine and its system besides vectors: prefetches, the clock of spinning threads, sleep.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

// always_inline, because GCC otherwise takes them for functions without effect and drops them. Arm's cores fetch
// streams from L2 to L1 by themselves.
__attribute__((always_inline)) static inline void prefetch_l1(const void* line) {
#if defined(__x86_64__)
  __builtin_prefetch(line, 0, 3);
#endif
}
__attribute__((always_inline)) static inline void prefetch_l2(const void* line) { __builtin_prefetch(line, 0, 2); }

#if defined(__x86_64__)
static inline void pause_thread() { _mm_pause(); }
static inline uint64_t ticks() { return __rdtsc(); }
static inline uint64_t ticks_per_us() { return 2500; }  // 2 to 3 per ns
#else
static inline void pause_thread() { asm volatile("isb" ::: "memory"); }  // `yield` takes a single cycle on most cores
static inline uint64_t ticks() {
  uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
}
static inline uint64_t ticks_per_us() {
  uint64_t per_second;
  asm volatile("mrs %0, cntfrq_el0" : "=r"(per_second));
  return per_second / 1'000'000 + 1;
}
#endif

// Threads that sleep until a number changes.
class Sleepers {
 public:
  // Sleeps while `number` is `seen`.
  void sleep(const std::atomic<uint32_t>& number, uint32_t seen) {
    count_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
    while (number.load(std::memory_order_seq_cst) == seen)
      syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, int(seen), nullptr, nullptr, 0);
#else
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return number.load(std::memory_order_seq_cst) != seen; });
#endif
    count_.fetch_sub(1, std::memory_order_relaxed);
  }
  // Wakes all threads; `number` has changed.
  void wake(const std::atomic<uint32_t>& number) {
    if (count_.load(std::memory_order_seq_cst) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
#endif
  }

 private:
  std::atomic<int> count_{0};
#if !defined(__linux__)
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};
