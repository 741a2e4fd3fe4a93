#pragma once

#include <atomic>
#include <csignal>
#include <thread>

namespace nibble {

/// While it lives, SIGINT and SIGTERM do not end the process but set a flag, so that long work can
/// stop at a good place. To be made before other threads start: they inherit the blocked signals.
class StopOnSignal final {
 public:
  StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;
  ~StopOnSignal();

  [[nodiscard]] const std::atomic<bool>& flag() const { return stop_; }

 private:
  void watch();

  sigset_t signals_{};
  sigset_t before_{};
  std::atomic<bool> stop_{false};
  std::atomic<bool> done_{false};
  std::thread watcher_;
};

}  // namespace nibble
