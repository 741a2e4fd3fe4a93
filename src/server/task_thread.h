#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <thread>

#include "base/queue.h"
#include "base/thread_name.h"

namespace nibble {

/// A thread for work that would hold up the streams of an HTTP thread. Tasks run one after another
/// and must not throw.
class TaskThread final {
 public:
  /// `name` is a constant, for name_thread().
  TaskThread(const char* name, size_t most_waiting)
      : tasks_(most_waiting), thread_([this, name] {
          name_thread(name);
          run();
        }) {}
  /// Waits for the task that runs; those that wait are dropped.
  ~TaskThread() {
    stopping_ = true;
    tasks_.close();
    thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  /// False, and nothing is done, where too many wait. Thread-safe.
  [[nodiscard]] bool post(std::function<void()> task) { return tasks_.try_push(task); }

 private:
  void run() {
    while (const auto task = tasks_.pop()) {
      if (!stopping_) {
        (*task)();
      }
    }
  }

  BoundedQueue<std::function<void()>> tasks_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses the others
};

}  // namespace nibble
