// A thread pool for work in many small pieces, and per-thread scratch memory.
//
// A parallel region ends when its pieces are done, even if some threads never joined: the region does not wait for a
// thread that sleeps or that the kernel has preempted. In OpenMP all threads wait for such a thread, a time slice each
// time, in a hundred regions per token.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include "machine.h"

class Pool {
 public:
  static Pool& get() {
    static Pool* pool = new Pool;  // never destroyed: its threads run until the process ends
    return *pool;
  }

  int threads() const { return threads_; }
  static int thread() { return thread_; }  // 1, 2 ... in the pool's own threads, else 0

  void set_threads(int n) {
    while (busy_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    threads_ = std::max(1, n);
    for (; started_ < threads_ - 1; started_++)
      std::thread([this, thread = started_ + 1] {
        thread_ = thread;
        work();
      }).detach();
    busy_.store(false, std::memory_order_release);
  }

  // Calls body() in this thread and, concurrently, in every pool thread that joins. body() takes work from a queue
  // until the queue is empty.
  template <typename F>
  void run(F&& body) {
    if (threads_ == 1 || busy_.exchange(true, std::memory_order_acquire))
      return body();  // another thread uses the pool
    call_ = [](void* p) { (*static_cast<std::remove_reference_t<F>*>(p))(); };
    context_ = &body;
    // state_ packs the region's number (32 bits), whether it is open (1) and how many pool threads are inside (31).
    // Sleepers wait for number_ to change.
    const uint32_t region = ++region_;
    state_.store(uint64_t(region) << 32 | kOpen, std::memory_order_release);
    number_.store(region, std::memory_order_seq_cst);
    sleepers_.wake(number_);
    body();
    state_.fetch_and(~uint64_t(kOpen), std::memory_order_acq_rel);
    for (const uint64_t start = ticks(); (state_.load(std::memory_order_acquire) & kInside) != 0;)
      ticks() - start < patience_ ? pause_thread() : std::this_thread::yield();
    busy_.store(false, std::memory_order_release);
  }

 private:
  static constexpr uint64_t kOpen = 1u << 31, kInside = kOpen - 1;
  // Spin times. Outside a region about 100 us: longer than the gap between two kernels, shorter than the gap between
  // two steps. In an open region with all pieces taken about 1 ms: another region follows, and waking threads for it
  // costs the caller time, too.
  const uint64_t patience_ = 100 * ticks_per_us(), patience_inside_ = 1000 * ticks_per_us();

  void work() {
    uint32_t seen = 0;
    for (;;) {
      for (uint64_t start = ticks(), since = start; number_.load(std::memory_order_acquire) == seen;) {
        pause_thread();
        const uint64_t now = ticks();
        if (now - since <= patience_) continue;
        if (!(state_.load(std::memory_order_relaxed) & kOpen) || now - start > patience_inside_) break;
        since = now;
      }
      if (number_.load(std::memory_order_acquire) == seen) sleepers_.sleep(number_, seen);
      uint64_t state = state_.load(std::memory_order_acquire);
      bool joined = false;
      while ((state & kOpen) && int(state & kInside) < threads_ - 1 &&
             !(joined = state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)));
      seen = uint32_t(state >> 32);
      if (!joined) continue;
      call_(context_);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  inline static thread_local int thread_ = 0;
  std::atomic<bool> busy_{false};  // no std::mutex: its try_lock wants a newer glibc than everything else here
  int started_ = 0;
  std::atomic<int> threads_{1};
  Sleepers sleepers_;
  uint32_t region_ = 0;
  void (*call_)(void*) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint32_t> number_{0};
};

// Hands out the pieces 0 .. end - 1 in order.
struct Queue {
  std::atomic<long> next{0};
  long end;
  explicit Queue(long n) : end(n) {}
  bool take(long& i) { return (i = next.fetch_add(1, std::memory_order_relaxed)) < end; }
};

// Hands out the pieces 0 .. n - 1 in one stretch per thread, so that a thread prefetches its own next piece and, if the
// pieces are rows, finds in its cache the rows it processed in the previous region. A thread that finishes its stretch
// takes pieces of the others.
class Stretches {
 public:
  Stretches(long n, int threads) : count_(int(std::max(1L, std::min({n, long(threads), long(kMost)})))) {
    for (int t = 0; t < count_; t++) stretch_[t].next = n * t / count_, stretch_[t].end = n * (t + 1) / count_;
  }
  int own() const { return Pool::thread() % count_; }
  long end(long own) const { return stretch_[own].end; }
  bool take(long own, long& i) {
    for (int t = 0; t < count_; t++) {
      Stretch& s = stretch_[(own + t) % count_];
      if (s.next.load(std::memory_order_relaxed) < s.end &&
          (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.end)
        return true;
    }
    return false;
  }

 private:
  static constexpr int kMost = 64;
  struct alignas(64) Stretch { std::atomic<long> next; long end; } stretch_[kMost];
  int count_;
};

// Calls f(0) .. f(n - 1) in parallel, `grain` of them per piece.
template <typename F>
void parallel_for(long n, long grain, F&& f) {
  if (n <= grain || Pool::get().threads() == 1) {
    for (long i = 0; i < n; i++) f(i);
    return;
  }
  Stretches stretches((n + grain - 1) / grain, Pool::get().threads());
  Pool::get().run([&] {
    for (long piece, own = stretches.own(); stretches.take(own, piece);)
      for (long i = piece * grain, end = std::min(n, i + grain); i < end; i++) f(i);
  });
}

struct Scratch {  // a thread's memory: grows on demand, freed when the thread ends
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
