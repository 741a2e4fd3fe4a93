#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace nibble {

/// Cores that this process may use: its affinity mask, at least 1.
[[nodiscard]] int usable_cores();

/// Threads that wait for loops. Calls come from one thread at a time, which works along. Idle
/// threads spin for about 20 microseconds, so that the many short loops of a step find them awake,
/// and then sleep.
class ThreadPool final {
 public:
  /// `threads` includes the caller; 0 means usable_cores().
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls fn(chunk, thread) for every chunk in [0, chunks), thread in [0, threads()), and returns
  /// when all are done. Which thread takes a chunk is not fixed. fn must not throw and must not
  /// start a loop on the same pool. Allocates nothing.
  template <typename Fn>
  void parallel_for(int64_t chunks, const Fn& fn) {
    if (chunks <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < chunks; ++i) {
        fn(i, 0);
      }
      return;
    }
    run(
        chunks,
        [](const void* context, int64_t chunk, int thread) {
          (*static_cast<const Fn*>(context))(chunk, thread);
        },
        &fn);
  }

 private:
  using Call = void (*)(const void* context, int64_t chunk, int thread);

  void run(int64_t chunks, Call call, const void* context);
  void work(int thread);
  /// Waits until a loop newer than `seen` starts; returns its number.
  uint64_t wait_for_loop(uint64_t seen);
  void take_chunks(int thread);

  std::vector<std::thread> workers_;
  // Written by the caller before loop_ is raised, read by workers after they saw it raised.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t chunks_ = 0;
  alignas(64) std::atomic<uint64_t> loop_{0};
  alignas(64) std::atomic<int64_t> next_chunk_{0};
  alignas(64) std::atomic<int> busy_{0};  // workers that have not finished the current loop
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace nibble
