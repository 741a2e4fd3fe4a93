#include "interrupts.h"

#include <poll.h>
#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/check.h"

namespace nibble {

Interrupts::Interrupts() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, &before_);
  fd_ = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
  CHECK(fd_ >= 0);
}

Interrupts::~Interrupts() {
  close(fd_);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

bool Interrupts::any() const {
  pollfd there{.fd = fd_, .events = POLLIN, .revents = 0};
  return poll(&there, 1, 0) == 1;
}

bool Interrupts::take() {
  signalfd_siginfo info{};
  bool any = false;
  while (read(fd_, &info, sizeof info) == sizeof info) {
    any = true;
  }
  return any;
}

}  // namespace nibble
