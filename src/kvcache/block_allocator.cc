#include "kvcache/block_allocator.h"

#include <limits>

#include "base/check.h"

namespace nibble {

BlockAllocator::BlockAllocator(int64_t num_pages) {
  CHECK_GT(num_pages, 0);
  CHECK_LE(num_pages, int64_t{std::numeric_limits<int32_t>::max()});
  ref_counts_.assign(static_cast<size_t>(num_pages), 0);
  free_.reserve(static_cast<size_t>(num_pages));
  for (int64_t page = num_pages - 1; page >= 0; --page) {
    free_.push_back(static_cast<int32_t>(page));
  }
}

std::optional<int32_t> BlockAllocator::allocate() {
  if (free_.empty()) {
    return std::nullopt;
  }
  const int32_t page = free_.back();
  free_.pop_back();
  ref_counts_[static_cast<size_t>(page)] = 1;
  return page;
}

void BlockAllocator::retain(int32_t page) {
  CHECK_GT(ref_count(page), 0);
  ++ref_counts_[static_cast<size_t>(page)];
}

bool BlockAllocator::release(int32_t page) {
  CHECK_GT(ref_count(page), 0);
  if (--ref_counts_[static_cast<size_t>(page)] > 0) {
    return false;
  }
  free_.push_back(page);
  return true;
}

int32_t BlockAllocator::ref_count(int32_t page) const {
  CHECK_GE(page, 0);
  CHECK_LT(int64_t{page}, num_pages());
  return ref_counts_[static_cast<size_t>(page)];
}

void BlockAllocator::check_integrity() const {
  std::vector<bool> listed(ref_counts_.size(), false);
  for (const int32_t page : free_) {
    CHECK_EQ(ref_count(page), 0);
    CHECK_MSG(!listed[static_cast<size_t>(page)], "page {} is free twice", page);
    listed[static_cast<size_t>(page)] = true;
  }
  for (size_t page = 0; page < ref_counts_.size(); ++page) {
    CHECK_MSG(listed[page] == (ref_counts_[page] == 0), "page {} is lost", page);
  }
}

}  // namespace nibble
