#include <algorithm>

#include "base/check.h"
#include "engine/scheduler.h"
#include "ops/kv.h"

// Whether a scheduler's books balance.

namespace nibble {

void Scheduler::check_sequence(const Sequence& sequence) const {
  CHECK_LT(sequence.computed, sequence.length());
  CHECK_LE(sequence.computed, room(sequence));
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    const PagePool& from = pages_.pool(pool);
    const PrefixCache::PageList& list = sequence.lists[static_cast<size_t>(pool)];
    CHECK_EQ(list.first, first_token_read(from.window(), sequence.computed) / limits_.page_size);
    // A page that is still written has one holder and is unknown to the cache.
    for (int64_t i = sequence.computed / limits_.page_size; i < std::ssize(list.pages); ++i) {
      const int32_t page = list.pages[static_cast<size_t>(i)];
      CHECK_EQ(from.allocator().ref_count(page), 1);
      CHECK(!from.contains(page));
    }
  }
}

void Scheduler::check_integrity() const {
  pages_.check_integrity();
  CHECK_LE(running(), limits_.max_num_seqs);
  CHECK(std::ranges::is_sorted(running_, {}, [](const Owned& s) { return s->turn; }));
  CHECK(std::ranges::is_sorted(waiting_, goes_before));
  for (const Owned& sequence : waiting_) {
    CHECK(room(*sequence) == 0 && sequence->computed == 0);
  }
  for (const Owned& sequence : running_) {
    check_sequence(*sequence);
  }
  for (int64_t pool = 0; pool < pages_.num_pools(); ++pool) {
    const PagePool& from = pages_.pool(pool);
    std::vector<int32_t> holders(static_cast<size_t>(from.allocator().num_pages()), 0);
    for (const Owned& sequence : running_) {
      const PrefixCache::PageList& list = sequence->lists[static_cast<size_t>(pool)];
      for (int64_t i = list.first; i < std::ssize(list.pages); ++i) {
        ++holders[static_cast<size_t>(list.pages[static_cast<size_t>(i)])];
      }
    }
    int64_t used = 0;
    for (int32_t page = 0; page < std::ssize(holders); ++page) {
      const int32_t held = holders[static_cast<size_t>(page)];
      CHECK_EQ(from.allocator().ref_count(page), held + (from.contains(page) ? 1 : 0));
      used += held > 0 ? 1 : 0;
    }
    CHECK_EQ(used + from.available_pages(), std::ssize(holders));
  }
}

}  // namespace nibble
