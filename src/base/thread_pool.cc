#include "base/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <climits>

#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "base/thread_name.h"

namespace nibble {
namespace {

// state_: bits 0..9 workers in the loop, bit 10 whether it takes more, bits 11..31 its number.
constexpr uint32_t kOpen = 1U << 10;
constexpr uint32_t kWorkersMask = kOpen - 1;
constexpr int kLoopShift = 11;
constexpr uint32_t kLoopMask = (1U << (32 - kLoopShift)) - 1;

// Measured on two cores of a virtual machine, 180 loops of 100 us, with a pause of 10 us between
// them, beside one process that is always busy: 76 % of the rate alone. Without kSharedSpin 49 %,
// without moving off the caller's core 60 %.
constexpr auto kIdleSpin = std::chrono::microseconds(50);
constexpr auto kSharedSpin = std::chrono::microseconds(5);
constexpr int kSharedLoops = 2000;
constexpr auto kCallerSpin = std::chrono::microseconds(50);
constexpr int kPausesPerClockRead = 16;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

/// Spins until `done` returns true or the time is over; returns what `done` said last.
template <typename Done>
bool spin(std::chrono::microseconds time, const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (done()) {
        return true;
      }
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

/// Sleeps while `word` is `value`; may return early.
void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

/// How often the system took the core from the calling thread.
int64_t count_preemptions() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

}  // namespace

ThreadPool::ThreadPool(int threads)
    : ThreadPool(plan_threads(read_cpu_topology(), {.threads = threads, .numa = NumaMode::kOff})) {}

ThreadPool::ThreadPool(const ThreadPlan& plan)
    : threads_(plan.threads()),
      plan_(plan),
      creator_(std::this_thread::get_id()),
      home_(allowed_cpus()),
      ranges_(std::make_unique<Range[]>(static_cast<size_t>(plan.threads()))) {
  CHECK_GT(threads_, 0);
  CHECK_LE(threads_, static_cast<int>(kWorkersMask));
  workers_.reserve(static_cast<size_t>(threads_ - 1));
  for (int i = 1; i < threads_; ++i) {
    workers_.emplace_back([this, i] {
      name_thread("pool", i);
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  loop_.fetch_add(1);
  futex_wake(loop_, INT_MAX);
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void ThreadPool::start_loop(int64_t chunks, Call call, const void* context) {
  call_ = call;
  context_ = context;
  for (int t = 0; t < threads_; ++t) {
    Range& range = ranges_[static_cast<size_t>(t)];
    range.next.store(chunks * t / threads_, std::memory_order_relaxed);
    range.end = chunks * (t + 1) / threads_;
  }
  const uint32_t loop = (loop_.load(std::memory_order_relaxed) + 1) & kLoopMask;
  state_.store(loop << kLoopShift | kOpen, std::memory_order_release);
  loop_.store(loop);  // sequentially consistent with sleepers_: either side sees the other
  if (sleepers_.load() > 0) {
    futex_wake(loop_, INT_MAX);
  }
}

void ThreadPool::run(int64_t chunks, Call call, const void* context) {
  const std::vector<int>& place = plan_.places.front();
  const bool on_creator = !place.empty() && std::this_thread::get_id() == creator_;
  if (!place.empty() && placed_ != std::this_thread::get_id()) {
    placed_ = on_creator ? std::thread::id() : std::this_thread::get_id();
    hold_to_cpus(place);
  }
  caller_cpu_.store(sched_getcpu(), std::memory_order_relaxed);
  start_loop(chunks, call, context);
  take_chunks(0);
  // All chunks are taken. Workers that did not come are not needed any more.
  const uint32_t state = state_.fetch_and(~kOpen, std::memory_order_acquire);
  if ((state & kWorkersMask) != 0) {
    wait_for_workers();
  }
  if (on_creator) {
    hold_to_cpus(home_);  // threads that it starts later must not inherit the place
  }
}

void ThreadPool::wait_for_workers() {
  const auto done = [&] { return (state_.load() & kWorkersMask) == 0; };
  if (spin(kCallerSpin, done)) {
    return;
  }
  // A worker lost its core in the middle of a chunk. Sleeping frees this core for it.
  while (!done()) {
    caller_sleeps_.store(1);
    if (!done()) {
      futex_wait(caller_sleeps_, 1);
    }
  }
  caller_sleeps_.store(0);
}

void ThreadPool::take_chunks(int thread) {
  int owner = thread;
  for (int visited = 0; visited < threads_; ++visited) {
    Range& range = ranges_[static_cast<size_t>(owner)];
    while (range.next.load(std::memory_order_relaxed) < range.end) {
      const int64_t chunk = range.next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= range.end) {
        break;
      }
      call_(context_, chunk, thread);
    }
    owner = owner + 1 == threads_ ? 0 : owner + 1;
  }
}

// What a worker remembers from loop to loop.
struct ThreadPool::Worker {
  int thread;
  uint32_t loop = 0;        // the last that it saw
  int64_t preemptions = 0;  // how often the system took the core away, when last asked
  int shared_loops = 0;     // loops for which the core is taken to be shared with others
  bool off_caller = false;  // whether it is held to the other cores than the caller's
};

bool ThreadPool::join_loop(Worker& worker) {
  for (;;) {
    const auto news = [&] { return loop_.load(std::memory_order_acquire) != worker.loop; };
    if (!spin(worker.shared_loops > 0 ? kSharedSpin : kIdleSpin, news)) {
      sleepers_.fetch_add(1);
      while (loop_.load() == worker.loop) {
        futex_wait(loop_, worker.loop);
      }
      sleepers_.fetch_sub(1);
    }
    if (stop_.load()) {
      return false;
    }
    if (worker.shared_loops > 0) {
      share_core(worker);
    }
    uint32_t state = state_.load(std::memory_order_relaxed);
    while ((state & kOpen) != 0 && state >> kLoopShift != worker.loop) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        worker.loop = state >> kLoopShift;
        return true;
      }
    }
    worker.loop = state >> kLoopShift;  // it ended without this thread
  }
}

void ThreadPool::share_core(Worker& worker) {
  const std::vector<int>& place = plan_.places[static_cast<size_t>(worker.thread)];
  const std::vector<int>& cpus = place.empty() ? home_ : place;
  if (--worker.shared_loops == 0) {
    if (worker.off_caller) {
      hold_to_cpus(cpus);
      worker.off_caller = false;
    }
    return;
  }
  // The system likes to wake a thread on its waker's core, where both get half of it.
  const int caller = caller_cpu_.load(std::memory_order_relaxed);
  if (sched_getcpu() == caller && cpus.size() > 1) {
    hold_to_cpus(cpus, caller);
    worker.off_caller = true;
  }
}

void ThreadPool::leave_loop(Worker& worker) {
  const uint32_t state = state_.fetch_sub(1);
  const bool last = (state & kOpen) == 0 && (state & kWorkersMask) == 1;
  if (!last || caller_sleeps_.exchange(0) == 0) {
    return;
  }
  futex_wake(caller_sleeps_, 1);
  const int64_t preemptions = count_preemptions();
  if (preemptions != worker.preemptions) {
    worker.preemptions = preemptions;
    worker.shared_loops = kSharedLoops;
  }
}

void ThreadPool::work(int thread) {
  const std::vector<int>& place = plan_.places[static_cast<size_t>(thread)];
  if (!place.empty()) {
    hold_to_cpus(place);
  }
  Worker worker{.thread = thread};
  while (join_loop(worker)) {
    take_chunks(thread);
    leave_loop(worker);
  }
}

}  // namespace nibble
