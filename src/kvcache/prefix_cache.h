#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvcache/block_allocator.h"

namespace nibble {

/// Full pages of past prompts and answers, shared without copying. A cached page is a node of a
/// tree: its parent node and its page_size token ids name it. Lookup hashes both, and compares both
/// on a hit, so a hash collision costs a comparison and never gives wrong text.
///
/// The cache holds one reference on each page it knows. A page that nobody else holds is
/// "reclaimable": it counts as available and is evicted, least recently used first, when the free
/// pages are gone. Sequences get and return all their pages here.
class PrefixCache final {
 public:
  using NodeId = int64_t;
  using Hash = uint64_t (*)(NodeId parent, std::span<const int32_t> tokens);
  static constexpr NodeId kRoot = -1;      // parent of a first page
  static constexpr NodeId kDetached = -2;  // not in the cache: children cannot be cached either

  struct Match {
    std::vector<int32_t> pages;  // each with a reference for the caller
    NodeId node = kRoot;         // of the last page
  };
  struct Inserted {
    NodeId node = kDetached;
    int32_t page = 0;  // what the caller holds now: its own page, or an equal one cached before
  };

  /// With `page_size` 0 nothing is ever cached. `allocator` must outlive this.
  PrefixCache(BlockAllocator& allocator, int64_t page_size, Hash hash = &PrefixCache::hash_page);

  /// A page for new tokens, with one reference; evicts if needed. Nothing when all are in use.
  std::optional<int32_t> acquire();
  /// Returns the caller's reference. Release a sequence's pages last page first: then the end of a
  /// chain is evicted before its beginning.
  void release(int32_t page);
  /// The longest cached chain of full pages that starts `tokens` and has at most `max_tokens`.
  Match match(std::span<const int32_t> tokens, int64_t max_tokens);
  /// Offers a full, computed page that the caller holds, following `parent`. If an equal page is
  /// cached already, the caller's reference moves to that one and its own page is released.
  Inserted insert(NodeId parent, std::span<const int32_t> tokens, int32_t page);
  /// Forgets everything. Pages that sequences hold stay theirs.
  void clear();

  [[nodiscard]] bool enabled() const { return page_size_ > 0; }
  [[nodiscard]] int64_t cached_pages() const { return static_cast<int64_t>(by_hash_.size()); }
  /// Pages that acquire() can still give: free and reclaimable.
  [[nodiscard]] int64_t available_pages() const {
    return allocator_.free_pages() + static_cast<int64_t>(reclaimable_.size());
  }
  /// Whether the cache holds a reference on `page`.
  [[nodiscard]] bool contains(int32_t page) const { return entry(page).node != kDetached; }
  /// CHECKs that nodes, references and the reclaimable list agree.
  void check_integrity() const;

  /// 64 bits over the parent and the tokens, well mixed.
  [[nodiscard]] static uint64_t hash_page(NodeId parent, std::span<const int32_t> tokens);

 private:
  struct Entry {
    NodeId node = kDetached;
    NodeId parent = kDetached;
    uint64_t hash = 0;
    std::vector<int32_t> tokens;
    bool reclaimable = false;
    std::list<int32_t>::iterator position;  // in reclaimable_
  };

  [[nodiscard]] Entry& entry(int32_t page) { return entries_[static_cast<size_t>(page)]; }
  [[nodiscard]] const Entry& entry(int32_t page) const {
    return entries_[static_cast<size_t>(page)];
  }
  [[nodiscard]] std::optional<int32_t> find(NodeId parent, std::span<const int32_t> tokens) const;
  [[nodiscard]] bool alive(NodeId node) const;
  void hold(int32_t page);
  void forget(int32_t page);

  BlockAllocator& allocator_;
  const int64_t page_size_;
  const Hash hash_;
  std::vector<Entry> entries_;                          // by page
  std::unordered_multimap<uint64_t, int32_t> by_hash_;  // to page
  std::list<int32_t> reclaimable_;                      // least recently used first
  int64_t next_serial_ = 0;
};

}  // namespace nibble
