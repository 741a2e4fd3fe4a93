#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "kvcache/block_allocator.h"

namespace nibble {

/// The pages of one pool of a cache, and which of them are cached: full pages of past tokens, on
/// which PrefixCache holds a reference. A cached page that nobody else holds is "reclaimable": it
/// counts as available and is the first to be taken, least recently used first, when the free pages
/// are gone.
class PagePool final {
 public:
  using NodeId = int64_t;
  static constexpr NodeId kNoNode = -2;

  PagePool(int64_t num_pages, int64_t window)
      : allocator_(num_pages), window_(window), slots_(static_cast<size_t>(num_pages)) {}

  /// A free page with one reference; nothing when none is free.
  std::optional<int32_t> allocate() { return allocator_.allocate(); }
  /// The page to evict next, when no page is free: -1 when none can be.
  [[nodiscard]] int32_t next_victim() const {
    return allocator_.free_pages() > 0 || reclaimable_.empty() ? -1 : reclaimable_.front();
  }
  /// One holder more, or less.
  void hold(int32_t page);
  void release(int32_t page);
  /// Makes a held page the cached one of `node`, which is one holder more; undoes that.
  void cache(int32_t page, NodeId node);
  void forget(int32_t page);

  [[nodiscard]] const BlockAllocator& allocator() const { return allocator_; }
  /// Of its layers; 0: none.
  [[nodiscard]] int64_t window() const { return window_; }
  /// Of a cached page; kNoNode for others.
  [[nodiscard]] NodeId node(int32_t page) const { return slot(page).node; }
  [[nodiscard]] bool contains(int32_t page) const { return node(page) != kNoNode; }
  [[nodiscard]] int64_t cached_pages() const { return cached_; }
  /// Pages that are free or reclaimable.
  [[nodiscard]] int64_t available_pages() const {
    return allocator_.free_pages() + static_cast<int64_t>(reclaimable_.size());
  }
  /// CHECKs that references and the reclaimable list agree.
  void check_integrity() const;

 private:
  struct Slot {
    NodeId node = kNoNode;
    bool reclaimable = false;
    std::list<int32_t>::iterator position;  // in reclaimable_
  };

  [[nodiscard]] Slot& slot(int32_t page) { return slots_[static_cast<size_t>(page)]; }
  [[nodiscard]] const Slot& slot(int32_t page) const { return slots_[static_cast<size_t>(page)]; }

  BlockAllocator allocator_;
  int64_t window_;
  std::vector<Slot> slots_;         // by page
  std::list<int32_t> reclaimable_;  // least recently used first
  int64_t cached_ = 0;
};

}  // namespace nibble
