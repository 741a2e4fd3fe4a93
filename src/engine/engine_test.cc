#include "engine/engine.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "base/testing/thread_names.h"
#include "engine/testing/fake_model.h"

namespace nibble {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Collects the events of one request from the engine's thread.
class Collector final {
 public:
  void take(const TokenEvent& event) {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(last_.finish, FinishReason::kNone);
    tokens_ += event.token >= 0 ? 1 : 0;
    last_ = event;
    changed_.notify_all();  // under the lock: the waiter may destroy this right after
  }
  TokenEvent wait_end() {
    std::unique_lock lock(mutex_);
    const bool ended = changed_.wait_for(lock, std::chrono::seconds(60),
                                         [&] { return last_.finish != FinishReason::kNone; });
    EXPECT_TRUE(ended) << "no final event";
    return last_;
  }
  void wait_tokens(int count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(60), [&] { return tokens_ >= count; }));
  }
  int tokens() {
    const std::lock_guard lock(mutex_);
    return tokens_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  TokenEvent last_;
  int tokens_ = 0;
};

Request make_request(std::vector<int32_t> prompt, int64_t max_tokens, Collector& collector) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  request.sampling.temperature = 0;
  request.on_event = [&collector](TokenEvent event) { collector.take(event); };
  return request;
}

std::unique_ptr<Engine> start(microseconds step_time, EngineOptions options = {}) {
  options.kv_code = KvCode::kF32;
  auto model = std::make_unique<FakeModel>(64, 4096);
  model->set_step_time(step_time);
  auto engine = Engine::start(std::move(model), options);
  EXPECT_TRUE(engine.ok());
  return std::move(engine).value();
}

bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) {
      return true;
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
  return false;
}

TEST(Engine, AnswersFromManyThreads) {
  const auto engine = start(microseconds(0), {.max_num_seqs = 4, .num_pages = 512});
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  std::atomic<int> lengths{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int i = 0; i < 50; ++i) {
        Collector collector;
        Request request = make_request({5, 6, t + 7}, 1 + i % 20, collector);
        const auto cancelled = request.cancelled;
        ASSERT_TRUE(engine->submit(std::move(request)).ok());
        if (i % 7 == 0) {
          cancelled->store(true);
        }
        (void)engine->stats();
        const TokenEvent last = collector.wait_end();
        lengths += last.finish == FinishReason::kLength ? 1 : 0;
        EXPECT_TRUE(last.finish == FinishReason::kLength || i % 7 == 0);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_GE(lengths, kThreads * 42);
  EXPECT_TRUE(eventually([&] { return engine->stats().pages_used == 0; }));
  EXPECT_EQ(engine->stats().running, 0);
}

TEST(Engine, ItsThreadHasAName) {
  const auto engine = start(microseconds(0));
  Collector collector;
  ASSERT_TRUE(engine->submit(make_request({5}, 1, collector)).ok());
  collector.wait_end();  // so it runs
  EXPECT_EQ(thread_names().count("engine"), 1U);
}

TEST(Engine, QueueIsBounded) {
  const auto engine = start(milliseconds(2), {.max_num_seqs = 1, .max_queued_requests = 2});
  Collector first;
  ASSERT_TRUE(engine->submit(make_request({5}, 100, first)).ok());
  first.wait_tokens(1);  // running now, not queued
  EXPECT_TRUE(eventually([&] { return engine->stats().running == 1; }));
  Collector others[2];
  EXPECT_TRUE(engine->submit(make_request({5}, 1, others[0])).ok());
  EXPECT_TRUE(engine->submit(make_request({5}, 1, others[1])).ok());
  Collector refused;
  EXPECT_EQ(engine->submit(make_request({5}, 1, refused)).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(engine->submit(make_request({}, 1, refused)).code(), StatusCode::kInvalidArgument);
  Collector stranger;  // what waits of one client keeps nobody else out
  Request other_client = make_request({5}, 1, stranger);
  other_client.client = 1;
  EXPECT_TRUE(engine->submit(std::move(other_client)).ok());
  EXPECT_EQ(stranger.wait_end().finish, FinishReason::kLength);
  EXPECT_EQ(others[1].wait_end().finish, FinishReason::kLength);
}

TEST(Engine, CancelsWaitingPrefillingAndDecoding) {
  const auto engine = start(milliseconds(2), {.max_num_seqs = 2, .max_num_batched_tokens = 4});
  Collector decoding;
  Collector prefilling;
  Collector waiting;
  std::vector<Request> requests = {make_request({5}, 4000, decoding),
                                   make_request(std::vector<int32_t>(3000, 5), 9, prefilling),
                                   make_request({5}, 9, waiting)};
  for (const Request& request : requests) {
    ASSERT_TRUE(engine->submit(request).ok());
  }
  decoding.wait_tokens(3);
  EXPECT_TRUE(eventually([&] { return engine->stats().running == 2; }));
  for (const Request& request : requests) {
    request.cancelled->store(true);
  }
  EXPECT_EQ(waiting.wait_end().finish, FinishReason::kCancelled);
  EXPECT_EQ(prefilling.wait_end().finish, FinishReason::kCancelled);
  EXPECT_EQ(decoding.wait_end().finish, FinishReason::kCancelled);
  EXPECT_EQ(prefilling.tokens(), 0);
  EXPECT_TRUE(eventually([&] { return engine->stats().pages_used == 0; }));
}

TEST(Engine, ForgetsPrefixesInFrontOfTheNextRequest) {
  auto engine = start(microseconds(0), {.page_size = 16});
  const std::vector<int32_t> prompt(64, 5);
  const auto cached = [&] {
    Collector collector;
    EXPECT_TRUE(engine->submit(make_request(prompt, 1, collector)).ok());
    return collector.wait_end().cached_tokens;
  };
  EXPECT_EQ(cached(), 0);
  EXPECT_GT(cached(), 0);
  Collector running;  // holds pages of the prefix meanwhile
  EXPECT_TRUE(engine->submit(make_request(prompt, 500, running)).ok());
  running.wait_tokens(1);
  engine->forget_prefixes();
  EXPECT_EQ(cached(), 0);
  EXPECT_GT(cached(), 0);
  EXPECT_EQ(running.wait_end().finish, FinishReason::kLength);
}

TEST(Engine, DrainFinishesThenRefuses) {
  const auto engine = start(microseconds(200));
  Collector collector;
  ASSERT_TRUE(engine->submit(make_request({5}, 50, collector)).ok());
  engine->drain(60);
  EXPECT_EQ(collector.wait_end().finish, FinishReason::kLength);
  Collector refused;
  EXPECT_EQ(engine->submit(make_request({5}, 1, refused)).code(), StatusCode::kUnavailable);
}

TEST(Engine, DrainCancelsWhatTakesTooLong) {
  const auto engine = start(milliseconds(1));
  Collector collector;
  ASSERT_TRUE(engine->submit(make_request({5}, 4000, collector)).ok());
  engine->drain(0.05);
  EXPECT_EQ(collector.wait_end().finish, FinishReason::kCancelled);
  EXPECT_EQ(engine->stats().pages_used, 0);
}

TEST(Engine, DestructorAnswersEverybody) {
  Collector collectors[3];
  {
    const auto engine = start(milliseconds(1), {.max_num_seqs = 1});
    for (Collector& collector : collectors) {
      ASSERT_TRUE(engine->submit(make_request({5}, 4000, collector)).ok());
    }
  }
  for (Collector& collector : collectors) {
    EXPECT_EQ(collector.wait_end().finish, FinishReason::kCancelled);
  }
}

TEST(Engine, InternalErrorFailsTheBatchAndMarksUnhealthy) {
  const auto engine = start(milliseconds(1));
  EXPECT_TRUE(engine->stats().healthy);
  Collector good;
  Collector bad;
  ASSERT_TRUE(engine->submit(make_request({5}, 4000, good)).ok());
  good.wait_tokens(1);
  ASSERT_TRUE(engine->submit(make_request({FakeModel::kErrorTrigger}, 5, bad)).ok());
  EXPECT_EQ(bad.wait_end().finish, FinishReason::kError);
  EXPECT_EQ(good.wait_end().finish, FinishReason::kError);
  EXPECT_TRUE(eventually([&] { return !engine->stats().healthy; }));
  EXPECT_NE(engine->stats().failure, "");
  Collector refused;
  const Status refusal = engine->submit(make_request({5}, 1, refused));
  EXPECT_EQ(refusal.code(), StatusCode::kUnavailable);
  EXPECT_NE(refusal.message().find(engine->stats().failure), std::string::npos);
  EXPECT_EQ(engine->stats().pages_used, 0);
  engine->drain(10);
}

}  // namespace
}  // namespace nibble
