#include "base/thread_pool.h"

#include <algorithm>
#include <chrono>

#include <sched.h>

namespace nibble {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);
constexpr int kPausesPerClockRead = 32;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  return std::max(1, CPU_COUNT(&set));
}

ThreadPool::ThreadPool(int threads) {
  const int width = threads > 0 ? threads : usable_cores();
  workers_.reserve(static_cast<size_t>(width - 1));
  for (int i = 1; i < width; ++i) {
    workers_.emplace_back([this, i] { work(i); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  loop_.fetch_add(1);
  { const std::lock_guard<std::mutex> lock(mutex_); }
  wake_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void ThreadPool::run(int64_t chunks, Call call, const void* context) {
  call_ = call;
  context_ = context;
  chunks_ = chunks;
  next_chunk_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  loop_.fetch_add(1);  // sequentially consistent with sleepers_: either side sees the other
  if (sleepers_.load() > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  take_chunks(0);
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < 4096) {
      pause_cpu();
    } else {
      std::this_thread::yield();  // more threads than cores: let the others finish
    }
  }
}

void ThreadPool::take_chunks(int thread) {
  for (;;) {
    const int64_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= chunks_) {
      return;
    }
    call_(context_, chunk, thread);
  }
}

uint64_t ThreadPool::wait_for_loop(uint64_t seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      const uint64_t now = loop_.load(std::memory_order_acquire);
      if (now != seen) {
        return now;
      }
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return loop_.load() != seen; });
  sleepers_.fetch_sub(1);
  return loop_.load(std::memory_order_acquire);
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    seen = wait_for_loop(seen);
    if (stop_.load()) {
      return;
    }
    take_chunks(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace nibble
