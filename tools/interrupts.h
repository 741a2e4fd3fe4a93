#pragma once

#include <csignal>

namespace nibble {

/// Ctrl-C as a readable descriptor. Blocks SIGINT for this thread and those it starts.
class Interrupts final {
 public:
  Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  ~Interrupts();

  [[nodiscard]] int fd() const { return fd_; }
  /// Whether signals are there, which stay.
  [[nodiscard]] bool any() const;
  /// Forgets signals that came; true if there were any.
  bool take();

 private:
  int fd_ = -1;
  sigset_t before_{};
};

}  // namespace nibble
