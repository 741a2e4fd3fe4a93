#include "kvcache/page_pool.h"

#include "base/check.h"

namespace nibble {

void PagePool::hold(int32_t page) {
  allocator_.retain(page);
  Slot& s = slot(page);
  if (s.reclaimable) {
    reclaimable_.erase(s.position);
    s.reclaimable = false;
  }
}

void PagePool::release(int32_t page) {
  if (allocator_.release(page) || !contains(page) || allocator_.ref_count(page) > 1) {
    return;
  }
  Slot& s = slot(page);
  CHECK(!s.reclaimable);
  s.reclaimable = true;
  s.position = reclaimable_.insert(reclaimable_.end(), page);
}

void PagePool::cache(int32_t page, NodeId node) {
  CHECK(!contains(page));
  slot(page).node = node;
  allocator_.retain(page);
  ++cached_;
}

void PagePool::forget(int32_t page) {
  CHECK(contains(page));
  Slot& s = slot(page);
  if (s.reclaimable) {
    reclaimable_.erase(s.position);
  }
  s = Slot{};
  --cached_;
  allocator_.release(page);
}

void PagePool::check_integrity() const {
  allocator_.check_integrity();
  int64_t cached = 0;
  int64_t reclaimable = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto page = static_cast<int32_t>(i);
    const Slot& s = slots_[i];
    if (!contains(page)) {
      CHECK(!s.reclaimable);
      continue;
    }
    ++cached;
    reclaimable += s.reclaimable ? 1 : 0;
    CHECK_GE(allocator_.ref_count(page), 1);
    CHECK_EQ(s.reclaimable, allocator_.ref_count(page) == 1);
  }
  CHECK_EQ(cached, cached_);
  CHECK_EQ(reclaimable, static_cast<int64_t>(reclaimable_.size()));
}

}  // namespace nibble
