#include "kvcache/prefix_cache.h"

#include <algorithm>

#include "base/check.h"
#include "ops/kv.h"

namespace nibble {
namespace {

// The finalizer of a 64-bit mixer: xor-shifts and odd multipliers, a bijection.
uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  x ^= x >> 32;
  return x;
}

// What names a first page: keys of different salts differ, since pages have equally many tokens.
std::vector<int32_t> salted(std::span<const int32_t> salt, std::span<const int32_t> tokens) {
  std::vector<int32_t> key(salt.begin(), salt.end());
  key.insert(key.end(), tokens.begin(), tokens.end());
  return key;
}

}  // namespace

PrefixCache::PrefixCache(std::span<const PoolSize> pools, int64_t page_size, Hash hash)
    : page_size_(page_size), hash_(hash) {
  CHECK(!pools.empty());
  pools_.reserve(pools.size());
  for (const PoolSize& pool : pools) {
    pools_.emplace_back(pool.num_pages, pool.window);
  }
}

uint64_t PrefixCache::hash_page(NodeId parent, std::span<const int32_t> tokens) {
  uint64_t hash = mix(static_cast<uint64_t>(parent) + 0x9e3779b97f4a7c15ULL);
  for (const int32_t token : tokens) {
    hash = mix(hash + static_cast<uint32_t>(token) + 0x9e3779b97f4a7c15ULL);
  }
  return hash;
}

std::optional<int32_t> PrefixCache::acquire(int64_t pool) {
  PagePool& from = pools_[static_cast<size_t>(pool)];
  if (const int32_t victim = from.next_victim(); victim >= 0) {
    forget_page(static_cast<size_t>(pool), victim);
  }
  return from.allocate();
}

void PrefixCache::release(int64_t pool, int32_t page) {
  pools_[static_cast<size_t>(pool)].release(page);
}

// The nodes whose tokens start `tokens`, from the root on.
std::vector<PrefixCache::NodeId> PrefixCache::chain_of(std::span<const int32_t> tokens,
                                                       int64_t max_pages,
                                                       std::span<const int32_t> salt) const {
  std::vector<NodeId> chain;
  const auto size = static_cast<size_t>(page_size_);
  while (std::ssize(chain) < max_pages) {
    const auto page = tokens.subspan(chain.size() * size, size);
    const auto node = chain.empty() ? find(kRoot, salted(salt, page)) : find(chain.back(), page);
    if (!node) {
      break;
    }
    chain.push_back(*node);
  }
  return chain;
}

// The first page that the token behind `pages` pages reads.
int64_t PrefixCache::first_needed(const PagePool& pool, int64_t pages) const {
  return first_token_read(pool.window(), pages * page_size_) / page_size_;
}

// The longest beginning of a chain of which every pool has what the next token reads.
int64_t PrefixCache::usable_pages(std::span<const NodeId> chain) const {
  std::vector<int64_t> begin(pools_.size(), 0);  // of the pages that a pool has up to here
  int64_t usable = 0;
  for (int64_t count = 1; count <= std::ssize(chain); ++count) {
    const Node& node = nodes_.at(chain[static_cast<size_t>(count - 1)]);
    bool all = true;
    for (size_t pool = 0; pool < pools_.size(); ++pool) {
      begin[pool] = node.pages[pool] == kNoPage ? count : begin[pool];
      all = all && begin[pool] <= first_needed(pools_[pool], count);
    }
    usable = all ? count : usable;
  }
  return usable;
}

PrefixCache::Match PrefixCache::match(std::span<const int32_t> tokens,
                                      int64_t max_tokens,
                                      std::span<const int32_t> salt) {
  Match result{.pages = 0, .lists = std::vector<PageList>(pools_.size()), .node = kRoot};
  if (!enabled()) {
    return result;
  }
  const int64_t limit = std::min(static_cast<int64_t>(tokens.size()), max_tokens) / page_size_;
  const std::vector<NodeId> chain = chain_of(tokens, limit, salt);
  result.pages = usable_pages(chain);
  if (result.pages == 0) {
    return result;
  }
  result.node = chain[static_cast<size_t>(result.pages - 1)];
  for (size_t pool = 0; pool < pools_.size(); ++pool) {
    PageList& list = result.lists[pool];
    list.first = first_needed(pools_[pool], result.pages);
    list.pages.assign(static_cast<size_t>(result.pages), 0);
    for (auto i = static_cast<size_t>(list.first); i < list.pages.size(); ++i) {
      list.pages[i] = nodes_.at(chain[i]).pages[pool];
      pools_[pool].hold(list.pages[i]);
    }
  }
  return result;
}

PrefixCache::NodeId PrefixCache::insert(NodeId parent,
                                        std::span<const int32_t> tokens,
                                        std::span<int32_t> pages,
                                        std::span<const int32_t> salt) {
  CHECK_EQ(pages.size(), pools_.size());
  bool known = false;
  for (size_t pool = 0; pool < pools_.size(); ++pool) {
    CHECK_GT(pools_[pool].allocator().ref_count(pages[pool]), 0);
    known = known || pools_[pool].contains(pages[pool]);
  }
  if (!enabled() || !alive(parent) || known) {
    return kDetached;
  }
  CHECK_EQ(static_cast<int64_t>(tokens.size()), page_size_);
  std::vector<int32_t> key =
      parent == kRoot ? salted(salt, tokens) : std::vector(tokens.begin(), tokens.end());
  const auto equal = find(parent, key);
  const NodeId id = equal ? *equal : next_node_++;
  Node& node = nodes_[id];
  if (!equal) {
    node = {.parent = parent,
            .hash = hash_(parent, key),
            .tokens = std::move(key),
            .pages = std::vector<int32_t>(pools_.size(), kNoPage)};
    by_hash_.emplace(node.hash, id);
    if (parent != kRoot) {
      ++nodes_.at(parent).children;
    }
  }
  for (size_t pool = 0; pool < pools_.size(); ++pool) {
    int32_t& cached = node.pages[pool];
    if (cached == kNoPage) {
      cached = pages[pool];
      pools_[pool].cache(cached, id);
    } else {
      pools_[pool].hold(cached);
      pools_[pool].release(pages[pool]);
      pages[pool] = cached;
    }
  }
  return id;
}

void PrefixCache::clear() {
  for (const auto& [id, node] : nodes_) {
    for (size_t pool = 0; pool < pools_.size(); ++pool) {
      if (node.pages[pool] != kNoPage) {
        pools_[pool].forget(node.pages[pool]);
      }
    }
  }
  nodes_.clear();
  by_hash_.clear();
}

std::optional<PrefixCache::NodeId> PrefixCache::find(NodeId parent,
                                                     std::span<const int32_t> tokens) const {
  const auto [begin, end] = by_hash_.equal_range(hash_(parent, tokens));
  for (auto it = begin; it != end; ++it) {
    const Node& node = nodes_.at(it->second);
    if (node.parent == parent && std::ranges::equal(node.tokens, tokens)) {
      return it->second;
    }
  }
  return std::nullopt;
}

void PrefixCache::forget_page(size_t pool, int32_t page) {
  const NodeId id = pools_[pool].node(page);
  Node& node = nodes_.at(id);
  pools_[pool].forget(page);
  node.pages[pool] = kNoPage;
  if (pools_[pool].window() == 0) {  // the node is of no use: its other pages are not, either
    for (size_t other = 0; other < pools_.size(); ++other) {
      if (node.pages[other] != kNoPage) {
        pools_[other].forget(node.pages[other]);
        node.pages[other] = kNoPage;
      }
    }
  }
  remove_unused(id);
}

// Removes a node that has neither pages nor children, and what that leaves of its parents.
void PrefixCache::remove_unused(NodeId id) {
  while (id != kRoot) {
    const Node& node = nodes_.at(id);
    const auto has_page = [](int32_t page) { return page != kNoPage; };
    if (node.children > 0 || std::ranges::any_of(node.pages, has_page)) {
      return;
    }
    const auto [begin, end] = by_hash_.equal_range(node.hash);
    const auto it = std::find_if(begin, end, [&](const auto& item) { return item.second == id; });
    CHECK(it != end);
    by_hash_.erase(it);
    const NodeId parent = node.parent;
    nodes_.erase(id);
    if (parent != kRoot) {
      --nodes_.at(parent).children;
    }
    id = parent;
  }
}

void PrefixCache::check_integrity() const {
  CHECK_EQ(by_hash_.size(), nodes_.size());
  std::vector<int64_t> cached(pools_.size(), 0);
  std::unordered_map<NodeId, int64_t> children;
  for (const auto& [id, node] : nodes_) {
    CHECK_EQ(find(node.parent, node.tokens).value_or(kDetached), id);
    CHECK_MSG(alive(node.parent), "node {} outlived its parent", id);
    ++children[node.parent];
    for (size_t pool = 0; pool < pools_.size(); ++pool) {
      const int32_t page = node.pages[pool];
      cached[pool] += page != kNoPage ? 1 : 0;
      CHECK(page == kNoPage || pools_[pool].node(page) == id);
      if (pools_[pool].window() == 0) {
        CHECK_MSG(page != kNoPage, "node {} has lost a page that all need", id);
        if (node.parent != kRoot) {  // whoever can reach a page holds its parent
          const BlockAllocator& allocator = pools_[pool].allocator();
          CHECK_GE(allocator.ref_count(nodes_.at(node.parent).pages[pool]),
                   allocator.ref_count(page));
        }
      }
    }
  }
  for (const auto& [id, node] : nodes_) {
    CHECK_EQ(node.children, children[id]);
  }
  for (size_t pool = 0; pool < pools_.size(); ++pool) {
    pools_[pool].check_integrity();
    CHECK_EQ(cached[pool], pools_[pool].cached_pages());
  }
}

}  // namespace nibble
