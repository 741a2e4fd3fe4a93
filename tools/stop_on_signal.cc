#include "stop_on_signal.h"

#include <pthread.h>

#include "base/thread_name.h"

namespace nibble {

StopOnSignal::StopOnSignal() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  watcher_ = std::thread([this] {
    name_thread("signals");
    watch();
  });
}

StopOnSignal::~StopOnSignal() {
  done_ = true;
  pthread_kill(watcher_.native_handle(), SIGINT);  // wakes it
  watcher_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopOnSignal::watch() {
  while (!done_) {
    int signal = 0;
    if (sigwait(&signals_, &signal) == 0) {
      stop_ = true;
    }
  }
}

}  // namespace nibble
