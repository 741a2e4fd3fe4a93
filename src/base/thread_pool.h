#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/cpu_topology.h"

namespace nibble {

/// Threads that wait for loops. Calls come from one thread at a time, which works along.
///
/// Every thread owns one contiguous part of a loop's chunks, always the same one for the same
/// number of chunks, so that memory which a thread touched first stays its own; a thread that is
/// done takes chunks from the others. A loop waits only for threads that take part in it: one that
/// the system does not run just now is not missed. Idle threads spin for some ten microseconds, so
/// that the many short loops of a step find them awake, and then sleep.
class ThreadPool final {  // NOLINT(clang-analyzer-optin.performance.Padding): lines of their own
 public:
  /// One thread for each place of the plan, the caller included.
  explicit ThreadPool(const ThreadPlan& plan);
  /// `threads` includes the caller; 0 means one per usable core.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const { return threads_; }

  /// Calls fn(chunk, thread) for every chunk in [0, chunks), thread in [0, threads()), and returns
  /// when all are done. Which thread takes a chunk is not fixed. fn must not throw and must not
  /// start a loop on the same pool. Allocates nothing and takes no lock.
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

  // The chunks of one thread that nobody took yet; takers may raise next past end.
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  struct Worker;

  void start_loop(int64_t chunks, Call call, const void* context);
  void run(int64_t chunks, Call call, const void* context);
  void work(int thread);
  /// Waits for a new loop and enters it; false when the pool ends.
  bool join_loop(Worker& worker);
  void leave_loop(Worker& worker);
  void share_core(Worker& worker);
  void take_chunks(int thread);
  void wait_for_workers();

  const int threads_;
  const ThreadPlan plan_;
  const std::thread::id creator_;
  const std::vector<int> home_;  // CPUs of the creator
  std::thread::id placed_;       // the caller that is held to its place
  std::unique_ptr<Range[]> ranges_;
  // Written by the caller while no worker is in a loop.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  // Loop number, whether it takes workers, and how many are in it: see the .cc file.
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) std::atomic<uint32_t> loop_{0};  // number of the newest loop: what sleepers wait on
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> caller_cpu_{0};
  alignas(64) std::atomic<uint32_t> caller_sleeps_{0};
  std::vector<std::thread> workers_;
};

}  // namespace nibble
