#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "engine/sequence.h"
#include "engine/token_accounts.h"
#include "kvcache/prefix_cache.h"

namespace nibble {

struct SchedulerLimits {
  int64_t max_num_seqs = 1;
  int64_t max_num_batched_tokens = 1;  // at least max_num_seqs, so that decodes always fit
  // Most tokens of prompts in a step in which others decode, so that these wait no longer.
  int64_t max_mixed_prefill = std::numeric_limits<int64_t>::max();
  int64_t max_prompt_rows = 1;  // of logits that score prompts and drafts, in a step
  int64_t max_speculated_rows = kSpeculatedRows;  // of a step with drafts
  int64_t page_size = 1;
  // Longer prompts have keys that depend on their length, so they share no pages (DynamicRope).
  int64_t longest_shared_prompt = std::numeric_limits<int64_t>::max();
};

/// A sequence's part of a step: compute its next `num_tokens` tokens and, behind its last, the
/// first `num_draft` of its draft.
struct ScheduledSequence {
  Sequence* sequence = nullptr;
  int64_t num_tokens = 0;
  int64_t num_draft = 0;
};

/// Decides what each step computes, with continuous batching: every running decode gets one token,
/// prefill chunks fill the rest of the step, then waiting sequences are admitted: of those with the
/// lowest priority number one that ran before, else one of the client that was served least
/// (TokenAccounts), of its sequences the one that came first. A prompt that is scored takes as many
/// tokens as rows of logits are left, and none is admitted behind one that is cut so. When pages
/// run out, the sequence admitted last gives its pages back, and is computed again later; the first
/// can therefore always go on, and nobody starves. Pages of pools with a window are given back as
/// soon as no later token sees them. Touches no memory of the cache. Every sequence must fit into
/// all pages of each pool.
class Scheduler final {
 public:
  Scheduler(const SchedulerLimits& limits, PrefixCache& pages);

  /// Takes a new sequence; `sequence.arrival` must be larger than all before.
  void add(std::unique_ptr<Sequence> sequence);
  /// Plans a step; every planned sequence has the pages it needs. Valid until the next call of a
  /// member. Empty only if there are no sequences.
  [[nodiscard]] const std::vector<ScheduledSequence>& schedule();
  /// Gives every planned sequence pages for one more token than it will have, if so many are free.
  [[nodiscard]] bool extend(std::span<const ScheduledSequence> plan);
  /// Whether schedule() may admit a sequence that waits.
  [[nodiscard]] bool may_admit() const {
    return !waiting_.empty() && running() < limits_.max_num_seqs;
  }
  /// Notes that `num_tokens` more tokens of a running sequence are in its pages, and offers pages
  /// that became full to the prefix cache.
  void commit(Sequence& sequence, int64_t num_tokens);
  /// Takes a sequence out, wherever it is, and returns its pages.
  std::unique_ptr<Sequence> remove(Sequence& sequence);
  /// Removes all sequences for which `predicate` holds, in order of arrival.
  std::vector<std::unique_ptr<Sequence>> remove_if(
      const std::function<bool(const Sequence&)>& predicate);

  /// Gives up everything without returning pages, after an internal error made them doubtful.
  std::vector<std::unique_ptr<Sequence>> take_all();

  /// Whether `predicate` holds for any sequence.
  [[nodiscard]] bool any_of(const std::function<bool(const Sequence&)>& predicate) const;

  [[nodiscard]] int64_t running() const { return static_cast<int64_t>(running_.size()); }
  [[nodiscard]] int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  [[nodiscard]] bool idle() const { return running_.empty() && waiting_.empty(); }
  [[nodiscard]] int64_t preemptions() const { return preemptions_; }
  /// CHECKs: pages = free + cached + used; every reference is explained by a sequence or the
  /// cache; orders and limits hold. For tests: walks over everything.
  void check_integrity() const;

 private:
  using Owned = std::unique_ptr<Sequence>;

  [[nodiscard]] int64_t pages_for(int64_t tokens) const {
    return (tokens + limits_.page_size - 1) / limits_.page_size;
  }
  [[nodiscard]] int64_t missing_pages(const Sequence& sequence, int64_t pool) const;
  [[nodiscard]] bool fits(const Sequence& sequence) const;
  [[nodiscard]] int64_t room(const Sequence& sequence) const;
  void plan_running(size_t index, int64_t want);
  void plan_drafts();
  [[nodiscard]] int64_t within_rows(const Sequence& sequence, int64_t count);
  [[nodiscard]] bool grow(Sequence& sequence, int64_t tokens);
  [[nodiscard]] PrefixCache::Match match_of(const Sequence& sequence);
  [[nodiscard]] size_t next_waiting() const;
  [[nodiscard]] bool admit_next();
  void charge_answer(Sequence& sequence);
  void preempt_last();
  void offer_pages(Sequence& sequence);
  void release_unseen(Sequence& sequence);
  void release_pages(Sequence& sequence);
  void check_sequence(const Sequence& sequence) const;

  const SchedulerLimits limits_;
  PrefixCache& pages_;
  std::deque<Owned> waiting_;   // by priority, then arrival
  std::vector<Owned> running_;  // by turn
  TokenAccounts accounts_;      // of the clients of both
  std::vector<ScheduledSequence> plan_;
  std::vector<int32_t> offered_;  // scratch: a page of each pool
  int64_t budget_ = 0;            // tokens left in the step being planned
  int64_t rows_ = 0;              // rows of logits left for prompts that are scored, and drafts
  bool crowded_ = false;          // the step being planned ran out of pages: admit nobody
  int64_t preemptions_ = 0;
  int64_t turns_ = 0;  // admissions so far
};

}  // namespace nibble
