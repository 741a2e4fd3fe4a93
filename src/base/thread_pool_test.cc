#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(ThreadPool, RunsEveryChunkOnceInEveryLoop) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    std::vector<std::atomic<int>> counts(97);
    for (int loop = 1; loop <= 300; ++loop) {
      const int64_t chunks = loop % 98;
      for (auto& count : counts) {
        count = 0;
      }
      std::atomic<int> bad_thread{0};
      pool.parallel_for(chunks, [&](int64_t chunk, int thread) {
        counts[static_cast<size_t>(chunk)]++;
        if (thread < 0 || thread >= threads) {
          bad_thread++;
        }
      });
      EXPECT_EQ(bad_thread, 0);
      for (size_t i = 0; i < counts.size(); ++i) {
        ASSERT_EQ(counts[i], static_cast<int64_t>(i) < chunks ? 1 : 0);
      }
    }
  }
}

TEST(ThreadPool, WakesThreadsThatSleep) {
  ThreadPool pool(3);
  for (int loop = 0; loop < 5; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> sum{0};
    pool.parallel_for(10, [&](int64_t chunk, int) { sum += static_cast<int>(chunk); });
    EXPECT_EQ(sum, 45);
  }
}

TEST(ThreadPool, ResultsOfALoopAreVisibleToTheCaller) {
  ThreadPool pool(4);
  std::vector<int64_t> values(64);  // plain memory on purpose: the pool must order the accesses
  for (int64_t loop = 0; loop < 500; ++loop) {
    pool.parallel_for(64, [&](int64_t chunk, int) { values[static_cast<size_t>(chunk)] = loop; });
    for (const int64_t value : values) {
      ASSERT_EQ(value, loop);
    }
  }
}

TEST(ThreadPool, EveryThreadStartsWithItsOwnPartOfTheChunks) {
  constexpr int kThreads = 3;
  ThreadPool pool(kThreads);
  // Nobody is done before all have begun, so that nobody can steal a first chunk.
  std::atomic<int> begun{0};
  std::vector<int> taken_by(30, -1);
  pool.parallel_for(30, [&](int64_t chunk, int thread) {
    taken_by[static_cast<size_t>(chunk)] = thread;
    if (chunk % 10 == 0) {
      begun++;
      while (begun < kThreads) {
        std::this_thread::yield();
      }
    }
  });
  EXPECT_EQ(taken_by[0], 0);
  EXPECT_EQ(taken_by[10], 1);
  EXPECT_EQ(taken_by[20], 2);
}

TEST(ThreadPool, ThreadsTakeChunksOfOneThatIsHeldUp) {
  ThreadPool pool(2);
  std::atomic<int> others{0};
  pool.parallel_for(20, [&](int64_t chunk, int) {
    if (chunk == 0) {  // whoever has it waits until all the others are done
      while (others < 19) {
        std::this_thread::yield();
      }
    } else {
      others++;
    }
  });
  EXPECT_EQ(others, 19);
}

TEST(ThreadPool, CallsMayComeFromOneThreadAfterTheOther) {
  ThreadPool pool(plan_threads(read_cpu_topology(), {.threads = 2, .pinning = Pinning::kCores}));
  const std::vector<int> before = allowed_cpus();
  const auto sum = [&] {
    std::atomic<int> total{0};
    pool.parallel_for(10, [&](int64_t chunk, int) { total += static_cast<int>(chunk); });
    return total.load();
  };
  EXPECT_EQ(sum(), 45);
  EXPECT_EQ(allowed_cpus(), before);  // who made the pool is held only during a loop
  std::thread([&] {
    EXPECT_EQ(sum(), 45);
    EXPECT_EQ(allowed_cpus().size(), 1U);
  }).join();
  EXPECT_EQ(sum(), 45);
}

TEST(ThreadPool, DefaultWidthIsTheAffinityOfTheProcess) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_EQ(ThreadPool().threads(), usable_cores());
}

}  // namespace
}  // namespace nibble
