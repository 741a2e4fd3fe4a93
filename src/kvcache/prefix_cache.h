#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvcache/page_pool.h"

namespace nibble {

/// The pages of a cache, pool by pool, and among them full pages of past prompts and answers, which
/// are shared without copying. page_size tokens with a page in some pools are a node of a tree: its
/// parent node and its token ids name it. Lookup hashes both, and compares both on a hit, so a hash
/// collision costs a comparison and never gives wrong text.
///
/// The cache holds one reference on each page it knows; see PagePool for what becomes of it. Where
/// a pool without a window loses a page, its node is gone. One that lost the page of a pool with a
/// window still leads to its children, which may need it no more.
class PrefixCache final {
 public:
  using NodeId = PagePool::NodeId;
  using Hash = uint64_t (*)(NodeId parent, std::span<const int32_t> tokens);
  static constexpr NodeId kRoot = -1;                     // parent of a first page
  static constexpr NodeId kDetached = PagePool::kNoNode;  // not in the cache: children cannot be
                                                          // cached either
  struct PoolSize {
    int64_t num_pages = 0;
    int64_t window = 0;  // of its layers; 0: none
  };

  /// A sequence's pages in one pool. Those before `first` are not held: nobody reads them.
  struct PageList {
    std::vector<int32_t> pages;
    int64_t first = 0;

    [[nodiscard]] int64_t held() const { return std::ssize(pages) - first; }
  };

  struct Match {
    int64_t pages = 0;            // of tokens that need not be computed
    std::vector<PageList> lists;  // by pool, so many each; what is held has a reference
    NodeId node = kRoot;          // of the last page
  };

  /// With `page_size` 0 nothing is ever cached.
  PrefixCache(std::span<const PoolSize> pools, int64_t page_size, Hash hash = &hash_page);

  /// A page for new tokens, with one reference; evicts if needed. Nothing when all are in use.
  std::optional<int32_t> acquire(int64_t pool);
  /// Returns the caller's reference. Release a sequence's pages last page first: then the end of a
  /// chain is evicted before its beginning.
  void release(int64_t pool, int32_t page);
  /// The longest cached chain of full pages that starts `tokens`, has at most `max_tokens` and of
  /// which every pool has all that the next token reads. Only chains that were inserted with the
  /// same salt, any numbers, are found.
  Match match(std::span<const int32_t> tokens,
              int64_t max_tokens,
              std::span<const int32_t> salt = {});
  /// Offers full, computed pages that the caller holds, one of each pool, following `parent`. Where
  /// an equal page is cached already, the caller's reference moves to that one, which is written to
  /// `pages`, and its own page is released.
  NodeId insert(NodeId parent,
                std::span<const int32_t> tokens,
                std::span<int32_t> pages,
                std::span<const int32_t> salt = {});
  /// Forgets everything. Pages that sequences hold stay theirs.
  void clear();

  [[nodiscard]] bool enabled() const { return page_size_ > 0; }
  [[nodiscard]] int64_t num_pools() const { return std::ssize(pools_); }
  [[nodiscard]] const PagePool& pool(int64_t index) const {
    return pools_[static_cast<size_t>(index)];
  }
  /// Nodes of the tree, of which some may have lost their pages.
  [[nodiscard]] int64_t nodes() const { return std::ssize(nodes_); }
  /// CHECKs that nodes, references and the reclaimable lists agree.
  void check_integrity() const;

  /// 64 bits over the parent and the tokens, well mixed.
  [[nodiscard]] static uint64_t hash_page(NodeId parent, std::span<const int32_t> tokens);

 private:
  static constexpr int32_t kNoPage = -1;

  struct Node {
    NodeId parent = kRoot;
    uint64_t hash = 0;
    std::vector<int32_t> tokens;  // of a first page with a salt: behind that
    std::vector<int32_t> pages;   // by pool, or kNoPage
    int64_t children = 0;
  };

  [[nodiscard]] std::optional<NodeId> find(NodeId parent, std::span<const int32_t> tokens) const;
  [[nodiscard]] bool alive(NodeId node) const { return node == kRoot || nodes_.contains(node); }
  [[nodiscard]] std::vector<NodeId> chain_of(std::span<const int32_t> tokens,
                                             int64_t max_pages,
                                             std::span<const int32_t> salt) const;
  [[nodiscard]] int64_t first_needed(const PagePool& pool, int64_t pages) const;
  [[nodiscard]] int64_t usable_pages(std::span<const NodeId> chain) const;
  void forget_page(size_t pool, int32_t page);
  void remove_unused(NodeId id);

  const int64_t page_size_;
  const Hash hash_;
  std::vector<PagePool> pools_;
  std::unordered_map<NodeId, Node> nodes_;
  std::unordered_multimap<uint64_t, NodeId> by_hash_;
  NodeId next_node_ = 0;
};

}  // namespace nibble
