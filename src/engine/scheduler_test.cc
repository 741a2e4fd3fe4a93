#include "engine/scheduler.h"

#include <algorithm>
#include <limits>
#include <map>

#include <gtest/gtest.h>

#include "kvcache/kv_cache_shape.h"

namespace nibble {
namespace {

constexpr int64_t kPageSize = 4;

/// A scheduler whose steps are computed by counting.
class Schedule final {
 public:
  explicit Schedule(SchedulerLimits limits,
                    const std::vector<PrefixCache::PoolSize>& pools = {{.num_pages = 10000}})
      : pages_(pools, 0), scheduler_((limits.page_size = kPageSize, limits), pages_) {}

  Sequence* add(int64_t prompt, int64_t answer, int64_t client = 0, double share = 1) {
    auto sequence = std::make_unique<Sequence>();
    sequence->arrival = arrivals_++;
    sequence->tokens.assign(static_cast<size_t>(prompt), 5);
    sequence->prompt_tokens = prompt;
    sequence->request.max_tokens = answer;
    sequence->request.client = client;
    sequence->request.share = share;
    Sequence* const out = sequence.get();
    scheduler_.add(std::move(sequence));
    return out;
  }

  /// Tokens of prompts and of answers in a step; sequences that have all they want end.
  struct Work {
    int64_t prompt = 0, answer = 0;
  };
  Work step() {
    Work work;
    const std::vector<ScheduledSequence> plan = scheduler_.schedule();
    for (const ScheduledSequence& item : plan) {
      Sequence& sequence = *item.sequence;
      const bool decodes = sequence.generated() > 0;
      (decodes ? work.answer : work.prompt) += item.num_tokens;
      (decodes ? answered_ : read_)[sequence.request.client] += item.num_tokens;
      scheduler_.commit(sequence, item.num_tokens);
      if (sequence.remaining() > 0) {
        continue;
      }
      sequence.tokens.push_back(6);
      if (sequence.generated() >= sequence.request.max_tokens) {
        ended_.push_back(sequence.arrival);
        (void)scheduler_.remove(sequence);
      }
    }
    scheduler_.check_integrity();
    return work;
  }

  Scheduler& scheduler() { return scheduler_; }
  [[nodiscard]] const std::vector<int64_t>& ended() const { return ended_; }
  /// Tokens of a client's prompts that were read, and of its answers that were computed.
  std::map<int64_t, int64_t> read_, answered_;

 private:
  PrefixCache pages_;
  Scheduler scheduler_;
  int64_t arrivals_ = 0;
  std::vector<int64_t> ended_;  // arrivals
};

TEST(Scheduler, PromptsTakeWhatDecodesLeave) {
  Schedule schedule({.max_num_seqs = 8, .max_num_batched_tokens = 100});
  schedule.add(10, 50);
  schedule.step();
  schedule.add(300, 5);
  EXPECT_EQ(schedule.step().prompt, 99);
  EXPECT_EQ(schedule.step().prompt, 99);
}

TEST(Scheduler, BesideDecodesPromptsMayBeHeldBack) {
  Schedule schedule({.max_num_seqs = 8, .max_num_batched_tokens = 100, .max_mixed_prefill = 16});
  schedule.add(40, 4);
  EXPECT_EQ(schedule.step().prompt, 40);  // nobody decodes: there is nobody to wait
  schedule.add(60, 1);
  schedule.add(10, 1);
  for (int64_t i = 0; i < 3; ++i) {
    const Schedule::Work work = schedule.step();
    EXPECT_EQ(work.prompt, 16);
    EXPECT_EQ(work.answer, 1);
    EXPECT_EQ(schedule.scheduler().waiting(), 1);  // admitted when there is room in a step
  }
  EXPECT_EQ(schedule.step().prompt, 22);  // the decode is done: all the rest at once
  EXPECT_TRUE(schedule.scheduler().idle());
}

// A chunk for which the first of two windows has too few pages: it is cut to what all pools hold.
TEST(Scheduler, AChunkIsCutToThePagesOfEveryPool) {
  const int64_t least = window_pages(9, kPageSize);
  Schedule schedule({.max_num_seqs = 1, .max_num_batched_tokens = 23},
                    {{.num_pages = 40},
                     {.num_pages = least, .window = 9},
                     {.num_pages = window_pages(30, kPageSize), .window = 30}});
  schedule.add(100, 3);
  for (int i = 0; i < 40 && !schedule.scheduler().idle(); ++i) {
    schedule.step();
  }
  EXPECT_TRUE(schedule.scheduler().idle());
}

TEST(Scheduler, OneClientsQueueDoesNotStarveAnother) {
  Schedule schedule({.max_num_seqs = 2, .max_num_batched_tokens = 64});
  for (int i = 0; i < 100; ++i) {
    schedule.add(20, 10, 1);
  }
  schedule.step();
  const Sequence* const late = schedule.add(20, 10, 2);
  const int64_t arrival = late->arrival;
  while (std::ranges::count(schedule.ended(), arrival) == 0) {
    schedule.step();
    ASSERT_LT(schedule.ended().size(), 6U);
  }
}

TEST(Scheduler, WithinAClientAndAPriorityTheFirstGoesFirst) {
  Schedule schedule({.max_num_seqs = 1, .max_num_batched_tokens = 64});
  for (int i = 0; i < 6; ++i) {
    schedule.add(8, 3, i % 2);
  }
  while (!schedule.scheduler().idle()) {
    schedule.step();
  }
  EXPECT_EQ(schedule.ended(), (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  Sequence* const urgent = schedule.add(8, 3, 0);
  EXPECT_EQ(urgent->arrival, 6);
  schedule.step();
  schedule.add(8, 3, 1);
  schedule.add(8, 3, 0)->request.priority = 0;
  auto first = std::make_unique<Sequence>();
  first->arrival = 100;
  first->tokens.assign(8, 5);
  first->prompt_tokens = 8;
  first->request.max_tokens = 3;
  first->request.client = 0;
  first->request.priority = -1;  // of the client that was served most, but urgent
  schedule.scheduler().add(std::move(first));
  while (!schedule.scheduler().idle()) {
    schedule.step();
  }
  EXPECT_EQ(schedule.ended()[7], 100);
}

// Clients that always have requests get tokens in proportion to their shares; those of answers
// count twice. What any client is behind is bounded by what is admitted at a time.
TEST(Scheduler, ClientsAreServedByTheirShares) {
  Schedule schedule({.max_num_seqs = 4, .max_num_batched_tokens = 64});
  const std::map<int64_t, double> shares = {{1, 1}, {2, 1}, {3, 2}};
  const std::map<int64_t, int64_t> prompts = {{1, 10}, {2, 50}, {3, 20}};
  for (int i = 0; i < 600; ++i) {
    for (const auto& [client, share] : shares) {
      schedule.add(prompts.at(client), 10, client, share);
    }
  }
  for (int i = 0; i < 1500; ++i) {
    schedule.step();
  }
  std::map<int64_t, double> served;
  double least = std::numeric_limits<double>::max();
  double most = 0;
  for (const auto& [client, share] : shares) {
    ASSERT_TRUE(schedule.scheduler().any_of(
        [client = client](const Sequence& sequence) { return sequence.request.client == client; }));
    const auto tokens =
        static_cast<double>(schedule.read_[client] + 2 * schedule.answered_[client]);
    served[client] = tokens / share;
    least = std::min(least, served[client]);
    most = std::max(most, served[client]);
  }
  EXPECT_GT(least, 1000);
  // Four sequences, of at most 50 + 2 * 9 tokens each, ahead or behind.
  EXPECT_LT(most - least, 4 * 68);
}

}  // namespace
}  // namespace nibble
