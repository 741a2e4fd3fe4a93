#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace nibble {
namespace {

bool arrives_before(const std::unique_ptr<Sequence>& a, const std::unique_ptr<Sequence>& b) {
  return a->arrival < b->arrival;
}

template <typename Container>
void insert_by_arrival(Container& container, std::unique_ptr<Sequence> sequence) {
  const auto at = std::upper_bound(container.begin(), container.end(), sequence, arrives_before);
  container.insert(at, std::move(sequence));
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits, PrefixCache& pages, int64_t total_pages)
    : limits_(limits), pages_(pages), total_pages_(total_pages) {
  CHECK_GE(limits.max_num_seqs, 1);
  CHECK_GE(limits.max_num_batched_tokens, limits.max_num_seqs);
  CHECK_GE(limits.page_size, 1);
  running_.reserve(static_cast<size_t>(limits.max_num_seqs));
  plan_.reserve(static_cast<size_t>(limits.max_num_seqs));
}

void Scheduler::add(std::unique_ptr<Sequence> sequence) {
  CHECK(sequence->length() > 0 && sequence->pages.empty());
  insert_by_arrival(waiting_, std::move(sequence));
}

const std::vector<ScheduledSequence>& Scheduler::schedule() {
  plan_.clear();
  budget_ = limits_.max_num_batched_tokens;
  crowded_ = false;
  for (size_t i = 0; i < running_.size(); ++i) {  // running_ may shrink at its end meanwhile
    if (running_[i]->remaining() == 1) {
      plan_running(i, 1);
    }
  }
  for (size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    if (running_[i]->remaining() > 1) {
      plan_running(i, running_[i]->remaining());
    }
  }
  while (!crowded_ && budget_ > 0 && admit_next()) {
  }
  CHECK(!plan_.empty() || idle());
  return plan_;
}

// Plans up to `want` tokens of running_[index], as budget and pages allow.
void Scheduler::plan_running(size_t index, int64_t want) {
  Sequence& sequence = *running_[index];
  int64_t count = std::min(want, budget_);
  if (!grow(sequence, sequence.computed + count)) {
    crowded_ = true;
    count = static_cast<int64_t>(sequence.pages.size()) * limits_.page_size - sequence.computed;
  }
  if (count > 0) {
    plan_.push_back({&sequence, count});
    budget_ -= count;
  }
}

// Gives a sequence pages for `tokens` tokens, from younger ones if need be. False when it is the
// youngest and there are none left: it keeps what it has and goes on when others are done.
bool Scheduler::grow(Sequence& sequence, int64_t tokens) {
  while (static_cast<int64_t>(sequence.pages.size()) < pages_for(tokens)) {
    if (const auto page = pages_.acquire()) {
      sequence.pages.push_back(*page);
    } else if (running_.back().get() == &sequence) {
      return false;
    } else {
      preempt_youngest();
    }
  }
  return true;
}

void Scheduler::preempt_youngest() {
  crowded_ = true;
  ++preemptions_;
  Owned victim = std::move(running_.back());
  running_.pop_back();
  // Running sequences are the oldest of all and only the youngest can be inside its prompt, so
  // whoever takes pages away is planned before its victim.
  CHECK(std::none_of(plan_.begin(), plan_.end(),
                     [&](const ScheduledSequence& item) { return item.sequence == victim.get(); }));
  release_pages(*victim);
  insert_by_arrival(waiting_, std::move(victim));
}

// Pages that a sequence still lacks for the tokens it has and one more.
int64_t Scheduler::missing_pages(const Sequence& sequence) const {
  const int64_t all = std::min(pages_for(sequence.length() + 1), total_pages_);
  return std::max<int64_t>(all - static_cast<int64_t>(sequence.pages.size()), 0);
}

// Pages of others that begin as the sequence does.
PrefixCache::Match Scheduler::match_of(const Sequence& sequence) {
  if (sequence.prompt_tokens > limits_.longest_shared_prompt) {
    return {.pages = {}, .node = PrefixCache::kDetached};
  }
  // The last token is always computed: its logits are wanted.
  return pages_.match(sequence.tokens, sequence.length() - 1);
}

// Admits the first waiting sequence if all its known tokens fit beside what the running ones still
// need: admitting it earlier would only get it preempted.
bool Scheduler::admit_next() {
  if (waiting_.empty() || running() >= limits_.max_num_seqs) {
    return false;
  }
  Sequence& sequence = *waiting_.front();
  PrefixCache::Match match = match_of(sequence);
  sequence.pages = std::move(match.pages);
  sequence.node = match.node;
  sequence.offered_pages = static_cast<int64_t>(sequence.pages.size());
  sequence.computed = sequence.offered_pages * limits_.page_size;
  int64_t needed = missing_pages(sequence);
  for (const Owned& other : running_) {
    needed += missing_pages(*other);
  }
  if (!running_.empty() && needed > pages_.available_pages()) {
    release_pages(sequence);
    return false;
  }
  if (!sequence.admitted) {
    sequence.admitted = true;
    sequence.cached_tokens = sequence.computed;
  }
  Owned owned = std::move(waiting_.front());
  waiting_.pop_front();
  insert_by_arrival(running_, std::move(owned));
  const auto at = std::find_if(running_.begin(), running_.end(),
                               [&](const Owned& s) { return s.get() == &sequence; });
  plan_running(static_cast<size_t>(at - running_.begin()), sequence.remaining());
  return true;
}

bool Scheduler::extend(std::span<const ScheduledSequence> plan) {
  const auto missing = [&](const ScheduledSequence& item) {
    return pages_for(item.sequence->length() + 1) - std::ssize(item.sequence->pages);
  };
  int64_t needed = 0;
  for (const ScheduledSequence& item : plan) {
    needed += std::max<int64_t>(missing(item), 0);
  }
  if (needed > pages_.available_pages()) {
    return false;
  }
  for (const ScheduledSequence& item : plan) {
    while (missing(item) > 0) {
      item.sequence->pages.push_back(pages_.acquire().value());
    }
  }
  return true;
}

void Scheduler::commit(Sequence& sequence, int64_t num_tokens) {
  sequence.computed += num_tokens;
  CHECK_LE(sequence.computed, sequence.length());
  while ((sequence.offered_pages + 1) * limits_.page_size <= sequence.computed &&
         sequence.node != PrefixCache::kDetached) {
    const auto index = static_cast<size_t>(sequence.offered_pages);
    const auto page_size = static_cast<size_t>(limits_.page_size);
    const std::span<const int32_t> tokens(sequence.tokens);
    const auto inserted = pages_.insert(sequence.node, tokens.subspan(index * page_size, page_size),
                                        sequence.pages[index]);
    sequence.pages[index] = inserted.page;
    sequence.node = inserted.node;
    ++sequence.offered_pages;
  }
}

std::unique_ptr<Sequence> Scheduler::remove(Sequence& sequence) {
  auto removed = remove_if([&](const Sequence& other) { return &other == &sequence; });
  CHECK_EQ(removed.size(), size_t{1});
  return std::move(removed.front());
}

std::vector<std::unique_ptr<Sequence>> Scheduler::remove_if(
    const std::function<bool(const Sequence&)>& predicate) {
  std::vector<Owned> removed;
  const auto take = [&](auto& container) {
    for (auto it = container.begin(); it != container.end();) {
      if (!predicate(**it)) {
        ++it;
        continue;
      }
      release_pages(**it);
      removed.push_back(std::move(*it));
      it = container.erase(it);
    }
  };
  take(running_);
  take(waiting_);
  std::sort(removed.begin(), removed.end(), arrives_before);
  return removed;
}

std::vector<std::unique_ptr<Sequence>> Scheduler::take_all() {
  std::vector<Owned> all = std::move(running_);
  std::move(waiting_.begin(), waiting_.end(), std::back_inserter(all));
  running_.clear();
  waiting_.clear();
  std::sort(all.begin(), all.end(), arrives_before);
  return all;
}

void Scheduler::release_pages(Sequence& sequence) {
  while (!sequence.pages.empty()) {
    pages_.release(sequence.pages.back());
    sequence.pages.pop_back();
  }
  sequence.computed = 0;
  sequence.offered_pages = 0;
  sequence.node = PrefixCache::kRoot;
}

void Scheduler::check_integrity(const BlockAllocator& allocator) const {
  pages_.check_integrity();
  CHECK_LE(running(), limits_.max_num_seqs);
  CHECK(std::is_sorted(running_.begin(), running_.end(), arrives_before));
  CHECK(std::is_sorted(waiting_.begin(), waiting_.end(), arrives_before));
  std::vector<int32_t> holders(static_cast<size_t>(total_pages_), 0);
  for (const Owned& sequence : waiting_) {
    CHECK(sequence->pages.empty() && sequence->computed == 0);
  }
  for (const Owned& sequence : running_) {
    CHECK_LT(sequence->computed, sequence->length());
    CHECK_LE(pages_for(sequence->computed), static_cast<int64_t>(sequence->pages.size()));
    for (size_t i = 0; i < sequence->pages.size(); ++i) {
      const int32_t page = sequence->pages[i];
      ++holders[static_cast<size_t>(page)];
      // A page that is still written has one holder and is unknown to the cache.
      if (static_cast<int64_t>(i + 1) * limits_.page_size > sequence->computed) {
        CHECK_EQ(allocator.ref_count(page), 1);
        CHECK(!pages_.contains(page));
      }
    }
  }
  int64_t used = 0;
  for (int32_t page = 0; page < total_pages_; ++page) {
    const int32_t held = holders[static_cast<size_t>(page)];
    CHECK_EQ(allocator.ref_count(page), held + (pages_.contains(page) ? 1 : 0));
    used += held > 0 ? 1 : 0;
  }
  CHECK_EQ(used + pages_.available_pages(), total_pages_);
}

}  // namespace nibble
