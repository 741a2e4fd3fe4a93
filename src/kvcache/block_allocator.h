#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace nibble {

/// Counts who holds which page of one pool of a PagedKvCache. Knows page numbers only, no memory.
class BlockAllocator final {
 public:
  explicit BlockAllocator(int64_t num_pages);

  /// A free page with one reference, or nothing when all are held.
  std::optional<int32_t> allocate();
  /// One more holder of a held page.
  void retain(int32_t page);
  /// One holder less; true when the page is free now.
  bool release(int32_t page);

  [[nodiscard]] int64_t num_pages() const { return static_cast<int64_t>(ref_counts_.size()); }
  [[nodiscard]] int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  [[nodiscard]] int32_t ref_count(int32_t page) const;
  /// CHECKs that the free list and the counts tell the same story.
  void check_integrity() const;

 private:
  std::vector<int32_t> ref_counts_;
  std::vector<int32_t> free_;  // a stack: the page released last is used first (warm in cache)
};

}  // namespace nibble
