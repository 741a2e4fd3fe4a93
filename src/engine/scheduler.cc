#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kvcache/kv_cache_shape.h"

namespace nibble {
namespace {

// What a token of an answer counts beside one of a prompt. An H200 takes 2.3 times as long for it
// (bench/results/h200-models.json: 256 sequences and steps of 8192 tokens, bf16).
constexpr double kAnswerToken = 2;

bool arrives_before(const std::unique_ptr<Sequence>& a, const std::unique_ptr<Sequence>& b) {
  return a->arrival < b->arrival;
}

void insert_waiting(std::deque<std::unique_ptr<Sequence>>& waiting,
                    std::unique_ptr<Sequence> sequence) {
  const auto at = std::upper_bound(waiting.begin(), waiting.end(), sequence, goes_before);
  waiting.insert(at, std::move(sequence));
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits, PrefixCache& pages)
    : limits_(limits), pages_(pages), offered_(static_cast<size_t>(pages.num_pools())) {
  CHECK_GE(limits.max_num_seqs, 1);
  CHECK_GE(limits.max_num_batched_tokens, limits.max_num_seqs);
  CHECK_GE(limits.page_size, 1);
  CHECK_GE(limits.max_mixed_prefill, 1);
  CHECK_GE(limits.max_prompt_rows, 1);
  running_.reserve(static_cast<size_t>(limits.max_num_seqs));
  plan_.reserve(static_cast<size_t>(limits.max_num_seqs));
}

void Scheduler::add(std::unique_ptr<Sequence> sequence) {
  CHECK(sequence->length() > 0 && sequence->lists.empty());
  sequence->lists.resize(static_cast<size_t>(pages_.num_pools()));
  accounts_.enter(sequence->request.client);
  insert_waiting(waiting_, std::move(sequence));
}

const std::vector<ScheduledSequence>& Scheduler::schedule() {
  plan_.clear();
  budget_ = limits_.max_num_batched_tokens;
  rows_ = limits_.max_prompt_rows;
  crowded_ = false;
  for (size_t i = 0; i < running_.size(); ++i) {  // running_ may shrink at its end meanwhile
    if (running_[i]->remaining() == 1) {
      plan_running(i, 1);
    }
  }
  if (!plan_.empty()) {
    budget_ = std::min(budget_, limits_.max_mixed_prefill);
  }
  for (size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    if (running_[i]->remaining() > 1) {
      plan_running(i, running_[i]->remaining());
    }
  }
  while (!crowded_ && budget_ > 0 && admit_next()) {
  }
  CHECK(!plan_.empty() || idle());
  plan_drafts();
  return plan_;
}

// Spends pages that nobody has on tokens that are only proposed, in steps of few rows: in larger
// ones a row that may be in vain costs as much as one that is not.
void Scheduler::plan_drafts() {
  int64_t used = 0;
  for (const ScheduledSequence& item : plan_) {
    used += item.num_tokens;
  }
  budget_ = std::min(limits_.max_num_batched_tokens, limits_.max_speculated_rows) - used;
  for (ScheduledSequence& item : plan_) {
    Sequence& sequence = *item.sequence;
    const int64_t length = sequence.length();
    int64_t count = std::min({std::ssize(sequence.draft), budget_, rows_});
    if (crowded_ || count <= 0 || sequence.computed + item.num_tokens < length) {
      continue;
    }
    for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
      std::vector<int32_t>& pages = sequence.lists[static_cast<size_t>(pool)].pages;
      while (std::ssize(pages) < pages_for(length + count)) {
        const auto page = pages_.acquire(pool);
        if (!page) {
          count = std::ssize(pages) * limits_.page_size - length;
          break;
        }
        pages.push_back(*page);
      }
    }
    item.num_draft = std::max<int64_t>(count, 0);
    budget_ -= item.num_draft;
    rows_ -= item.num_draft;
  }
}

// Plans up to `want` tokens of running_[index], as budget and pages allow.
void Scheduler::plan_running(size_t index, int64_t want) {
  Sequence& sequence = *running_[index];
  int64_t count = within_rows(sequence, std::min(want, budget_));
  if (!grow(sequence, sequence.computed + count)) {
    crowded_ = true;
    count = room(sequence) - sequence.computed;
  }
  if (count > 0) {
    plan_.push_back({.sequence = &sequence, .num_tokens = count});
    budget_ -= count;
  }
}

// Of `count` tokens those for which there are rows of logits. Where there are not enough, the step
// is full: only the last running sequence can be inside its prompt.
int64_t Scheduler::within_rows(const Sequence& sequence, int64_t count) {
  const Sequence::PromptRows rows = sequence.prompt_rows(count);
  if (rows.count <= rows_) {
    rows_ -= rows.count;
    return count;
  }
  const int64_t fewer = rows.begin + rows_ - sequence.computed;
  budget_ = fewer;
  rows_ = 0;
  return fewer;
}

// Tokens that a sequence has pages for in every pool.
int64_t Scheduler::room(const Sequence& sequence) const {
  int64_t pages = std::numeric_limits<int64_t>::max() / limits_.page_size;
  for (const PrefixCache::PageList& list : sequence.lists) {
    pages = std::min(pages, std::ssize(list.pages));
  }
  return pages * limits_.page_size;
}

// Gives a sequence pages for `tokens` tokens, from later ones if need be. False when it is the
// last and there are none left: it keeps what it has, of every pool as many as there were, and goes
// on when others are done.
bool Scheduler::grow(Sequence& sequence, int64_t tokens) {
  bool all = true;
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    std::vector<int32_t>& pages = sequence.lists[static_cast<size_t>(pool)].pages;
    while (std::ssize(pages) < pages_for(tokens)) {
      if (const auto page = pages_.acquire(pool)) {
        pages.push_back(*page);
      } else if (running_.back().get() != &sequence) {
        preempt_last();
      } else {
        all = false;
        break;
      }
    }
  }
  return all;
}

void Scheduler::preempt_last() {
  crowded_ = true;
  ++preemptions_;
  Owned victim = std::move(running_.back());
  running_.pop_back();
  // Nobody is admitted behind a sequence that is inside its prompt, so only the last can be, and
  // whoever takes pages away is planned before its victim.
  CHECK(std::none_of(plan_.begin(), plan_.end(),
                     [&](const ScheduledSequence& item) { return item.sequence == victim.get(); }));
  release_pages(*victim);
  insert_waiting(waiting_, std::move(victim));
}

// Pages of a pool that a sequence still lacks, at most, for the tokens it has and one more.
int64_t Scheduler::missing_pages(const Sequence& sequence, int64_t pool) const {
  const PagePool& from = pages_.pool(pool);
  const PrefixCache::PageList& list = sequence.lists[static_cast<size_t>(pool)];
  int64_t most = pages_for(sequence.length() + 1) - list.first;
  if (from.window() > 0) {  // it has the window, and the tokens of one step
    const int64_t step = std::min(sequence.remaining(), limits_.max_num_batched_tokens);
    most = std::min(most, window_pages(from.window(), limits_.page_size) + pages_for(step));
  }
  most = std::min(most, from.allocator().num_pages());
  return std::max<int64_t>(most - list.held(), 0);
}

// Whether every pool has what a sequence and the running ones still need.
bool Scheduler::fits(const Sequence& sequence) const {
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    int64_t needed = missing_pages(sequence, pool);
    for (const Owned& other : running_) {
      needed += missing_pages(*other, pool);
    }
    if (needed > pages_.pool(pool).available_pages()) {
      return false;
    }
  }
  return true;
}

// Pages of others that begin as the sequence does.
PrefixCache::Match Scheduler::match_of(const Sequence& sequence) {
  if (sequence.prompt_tokens > limits_.longest_shared_prompt) {
    return {.pages = 0,
            .lists = std::vector<PrefixCache::PageList>(sequence.lists.size()),
            .node = PrefixCache::kDetached};
  }
  return pages_.match(sequence.tokens, sequence.skippable(), sequence.salt);
}

// The place of the sequence that is admitted next: see the class.
size_t Scheduler::next_waiting() const {
  const int64_t priority = waiting_.front()->request.priority;
  const auto rank = [&](const Sequence& sequence) {
    return std::pair(!sequence.admitted, accounts_.served(sequence.request.client));
  };
  size_t best = 0;
  for (size_t i = 1;
       i < waiting_.size() && waiting_[i]->request.priority == priority && accounts_.clients() > 1;
       ++i) {
    best = rank(*waiting_[i]) < rank(*waiting_[best]) ? i : best;
  }
  return best;
}

// Admits the next waiting sequence if all its known tokens fit beside what the running ones still
// need: admitting it earlier would only get it preempted.
bool Scheduler::admit_next() {
  if (waiting_.empty() || running() >= limits_.max_num_seqs) {
    return false;
  }
  const auto place = waiting_.begin() + static_cast<std::ptrdiff_t>(next_waiting());
  Sequence& sequence = **place;
  PrefixCache::Match match = match_of(sequence);
  sequence.lists = std::move(match.lists);
  sequence.node = match.node;
  sequence.offered_pages = match.pages;
  sequence.computed = match.pages * limits_.page_size;
  if (!running_.empty() && !fits(sequence)) {
    release_pages(sequence);
    return false;
  }
  if (!sequence.admitted) {
    sequence.admitted = true;
    sequence.cached_tokens = sequence.computed;
    sequence.charged = sequence.prompt_tokens;  // at once, for the choice of the next one
    accounts_.charge(sequence.request.client,
                     static_cast<double>(sequence.prompt_tokens - sequence.computed),
                     sequence.request.share);
  }
  sequence.turn = ++turns_;
  running_.push_back(std::move(*place));
  waiting_.erase(place);
  plan_running(running_.size() - 1, sequence.remaining());
  return true;
}

bool Scheduler::extend(std::span<const ScheduledSequence> plan) {
  const auto missing = [&](const Sequence& sequence, int64_t pool) {
    const auto& pages = sequence.lists[static_cast<size_t>(pool)].pages;
    return std::max<int64_t>(pages_for(sequence.length() + 1) - std::ssize(pages), 0);
  };
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    int64_t needed = 0;
    for (const ScheduledSequence& item : plan) {
      needed += missing(*item.sequence, pool);
    }
    if (needed > pages_.pool(pool).available_pages()) {
      return false;
    }
  }
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    for (const ScheduledSequence& item : plan) {
      while (missing(*item.sequence, pool) > 0) {
        item.sequence->lists[static_cast<size_t>(pool)].pages.push_back(
            pages_.acquire(pool).value());
      }
    }
  }
  return true;
}

void Scheduler::commit(Sequence& sequence, int64_t num_tokens) {
  sequence.computed += num_tokens;
  CHECK_LE(sequence.computed, sequence.length());
  charge_answer(sequence);
  offer_pages(sequence);
  release_unseen(sequence);
}

// Charges its client for tokens of the answer that were computed for the first time.
void Scheduler::charge_answer(Sequence& sequence) {
  if (sequence.computed > sequence.charged) {
    const auto tokens = static_cast<double>(sequence.computed - sequence.charged);
    accounts_.charge(sequence.request.client, kAnswerToken * tokens, sequence.request.share);
    sequence.charged = sequence.computed;
  }
}

// Offers pages that became full to the prefix cache.
void Scheduler::offer_pages(Sequence& sequence) {
  while ((sequence.offered_pages + 1) * limits_.page_size <= sequence.computed &&
         sequence.node != PrefixCache::kDetached) {
    const auto index = static_cast<size_t>(sequence.offered_pages);
    const auto page_size = static_cast<size_t>(limits_.page_size);
    const std::span<const int32_t> tokens(sequence.tokens);
    for (size_t pool = 0; pool < offered_.size(); ++pool) {
      offered_[pool] = sequence.lists[pool].pages[index];
    }
    sequence.node = pages_.insert(sequence.node, tokens.subspan(index * page_size, page_size),
                                  offered_, sequence.salt);
    for (size_t pool = 0; pool < offered_.size(); ++pool) {
      sequence.lists[pool].pages[index] = offered_[pool];
    }
    ++sequence.offered_pages;
  }
}

// Gives back pages that no token after the computed ones sees. Of a step that has been started
// already that is true, too: its tokens are such. The list still names the page, which is no
// matter.
void Scheduler::release_unseen(Sequence& sequence) {
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    PrefixCache::PageList& list = sequence.lists[static_cast<size_t>(pool)];
    const int64_t window = pages_.pool(pool).window();
    const int64_t first = first_token_read(window, sequence.computed) / limits_.page_size;
    for (; list.first < first; ++list.first) {
      pages_.release(pool, list.pages[static_cast<size_t>(list.first)]);
    }
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
      accounts_.leave((*it)->request.client);
      removed.push_back(std::move(*it));
      it = container.erase(it);
    }
  };
  take(running_);
  take(waiting_);
  std::sort(removed.begin(), removed.end(), arrives_before);
  return removed;
}

bool Scheduler::any_of(const std::function<bool(const Sequence&)>& predicate) const {
  const auto holds = [&](const Owned& sequence) { return predicate(*sequence); };
  return std::ranges::any_of(running_, holds) || std::ranges::any_of(waiting_, holds);
}

std::vector<std::unique_ptr<Sequence>> Scheduler::take_all() {
  std::vector<Owned> all = std::move(running_);
  std::move(waiting_.begin(), waiting_.end(), std::back_inserter(all));
  running_.clear();
  waiting_.clear();
  accounts_ = {};
  std::sort(all.begin(), all.end(), arrives_before);
  return all;
}

void Scheduler::release_pages(Sequence& sequence) {
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    PrefixCache::PageList& list = sequence.lists[static_cast<size_t>(pool)];
    while (list.held() > 0) {
      pages_.release(pool, list.pages.back());
      list.pages.pop_back();
    }
    list = {};
  }
  sequence.shadow.reset();
  sequence.computed = 0;
  sequence.offered_pages = 0;
  sequence.node = PrefixCache::kRoot;
}

}  // namespace nibble
