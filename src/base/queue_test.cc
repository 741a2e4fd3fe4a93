#include "base/queue.h"

#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(BoundedQueue, KeepsOrderAndBound) {
  BoundedQueue<int> queue(2);
  int item = 1;
  EXPECT_TRUE(queue.try_push(item));
  EXPECT_TRUE(queue.push(2));
  item = 3;
  EXPECT_FALSE(queue.try_push(item));
  EXPECT_EQ(item, 3);
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.try_pop(), 2);
  EXPECT_EQ(queue.try_pop(), std::nullopt);
}

TEST(BoundedQueue, ClosingDrainsAndStops) {
  BoundedQueue<int> queue(4);
  EXPECT_TRUE(queue.push(5));
  queue.close();
  EXPECT_FALSE(queue.push(6));
  EXPECT_EQ(queue.pop(), 5);
  EXPECT_EQ(queue.pop(), std::nullopt);
}

TEST(BoundedQueue, ManyProducersAndConsumersLoseNothing) {
  constexpr int kThreads = 4;
  constexpr int kItems = 2000;
  BoundedQueue<int> queue(3);
  std::vector<int64_t> sums(kThreads, 0);
  std::vector<std::thread> consumers;
  for (int t = 0; t < kThreads; ++t) {
    consumers.emplace_back([&, t] {
      while (const auto item = queue.pop()) {
        sums[static_cast<size_t>(t)] += *item;
      }
    });
  }
  std::vector<std::thread> producers;
  for (int t = 0; t < kThreads; ++t) {
    producers.emplace_back([&] {
      for (int i = 1; i <= kItems; ++i) {
        EXPECT_TRUE(queue.push(i));
      }
    });
  }
  for (auto& thread : producers) {
    thread.join();
  }
  queue.close();
  for (auto& thread : consumers) {
    thread.join();
  }
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), int64_t{0}),
            int64_t{kThreads} * kItems * (kItems + 1) / 2);
}

}  // namespace
}  // namespace nibble
