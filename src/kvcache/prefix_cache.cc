#include "kvcache/prefix_cache.h"

#include <algorithm>

#include "base/check.h"

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

}  // namespace

PrefixCache::PrefixCache(BlockAllocator& allocator, int64_t page_size, Hash hash)
    : allocator_(allocator),
      page_size_(page_size),
      hash_(hash),
      entries_(static_cast<size_t>(allocator.num_pages())) {}

uint64_t PrefixCache::hash_page(NodeId parent, std::span<const int32_t> tokens) {
  uint64_t hash = mix(static_cast<uint64_t>(parent) + 0x9e3779b97f4a7c15ULL);
  for (const int32_t token : tokens) {
    hash = mix(hash + static_cast<uint32_t>(token) + 0x9e3779b97f4a7c15ULL);
  }
  return hash;
}

std::optional<int32_t> PrefixCache::acquire() {
  if (allocator_.free_pages() == 0 && !reclaimable_.empty()) {
    forget(reclaimable_.front());
  }
  return allocator_.allocate();
}

void PrefixCache::release(int32_t page) {
  if (allocator_.release(page) || !contains(page) || allocator_.ref_count(page) > 1) {
    return;
  }
  Entry& e = entry(page);
  CHECK(!e.reclaimable);
  e.reclaimable = true;
  e.position = reclaimable_.insert(reclaimable_.end(), page);
}

PrefixCache::Match PrefixCache::match(std::span<const int32_t> tokens, int64_t max_tokens) {
  Match result;
  if (!enabled()) {
    return result;
  }
  const int64_t limit = std::min(static_cast<int64_t>(tokens.size()), max_tokens) / page_size_;
  for (int64_t i = 0; i < limit; ++i) {
    const auto page = find(result.node, tokens.subspan(static_cast<size_t>(i * page_size_),
                                                       static_cast<size_t>(page_size_)));
    if (!page) {
      break;
    }
    hold(*page);
    result.pages.push_back(*page);
    result.node = entry(*page).node;
  }
  return result;
}

PrefixCache::Inserted PrefixCache::insert(NodeId parent,
                                          std::span<const int32_t> tokens,
                                          int32_t page) {
  CHECK_GT(allocator_.ref_count(page), 0);
  if (!enabled() || !alive(parent) || contains(page)) {
    return {kDetached, page};
  }
  CHECK_EQ(static_cast<int64_t>(tokens.size()), page_size_);
  if (const auto equal = find(parent, tokens)) {
    hold(*equal);
    allocator_.release(page);
    return {entry(*equal).node, *equal};
  }
  Entry& e = entry(page);
  // Serial numbers make a node unique for ever; the page in it lets alive() find the entry.
  e.node = next_serial_++ * allocator_.num_pages() + page;
  e.parent = parent;
  e.hash = hash_(parent, tokens);
  e.tokens.assign(tokens.begin(), tokens.end());
  by_hash_.emplace(e.hash, page);
  allocator_.retain(page);
  return {e.node, page};
}

void PrefixCache::clear() {
  for (size_t page = 0; page < entries_.size(); ++page) {
    if (contains(static_cast<int32_t>(page))) {
      forget(static_cast<int32_t>(page));
    }
  }
}

std::optional<int32_t> PrefixCache::find(NodeId parent, std::span<const int32_t> tokens) const {
  const auto [begin, end] = by_hash_.equal_range(hash_(parent, tokens));
  for (auto it = begin; it != end; ++it) {
    const Entry& e = entry(it->second);
    if (e.parent == parent && std::ranges::equal(e.tokens, tokens)) {
      return it->second;
    }
  }
  return std::nullopt;
}

bool PrefixCache::alive(NodeId node) const {
  return node == kRoot ||
         (node >= 0 && entry(static_cast<int32_t>(node % allocator_.num_pages())).node == node);
}

void PrefixCache::hold(int32_t page) {
  allocator_.retain(page);
  Entry& e = entry(page);
  if (e.reclaimable) {
    reclaimable_.erase(e.position);
    e.reclaimable = false;
  }
}

void PrefixCache::forget(int32_t page) {
  Entry& e = entry(page);
  const auto [begin, end] = by_hash_.equal_range(e.hash);
  const auto it = std::find_if(begin, end, [&](const auto& item) { return item.second == page; });
  CHECK(it != end);
  by_hash_.erase(it);
  if (e.reclaimable) {
    reclaimable_.erase(e.position);
  }
  e = Entry{};
  allocator_.release(page);
}

void PrefixCache::check_integrity() const {
  allocator_.check_integrity();
  int64_t known = 0;
  int64_t reclaimable = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const auto page = static_cast<int32_t>(i);
    const Entry& e = entry(page);
    if (!contains(page)) {
      CHECK(!e.reclaimable);
      continue;
    }
    ++known;
    reclaimable += e.reclaimable ? 1 : 0;
    CHECK_GE(allocator_.ref_count(page), 1);
    CHECK_EQ(e.reclaimable, allocator_.ref_count(page) == 1);
    CHECK_EQ(find(e.parent, e.tokens).value_or(-1), page);
    CHECK_MSG(alive(e.parent), "page {} outlived its parent", page);
    if (e.parent != kRoot) {  // whoever can reach a page holds its parent
      const auto parent = static_cast<int32_t>(e.parent % allocator_.num_pages());
      CHECK_GE(allocator_.ref_count(parent), allocator_.ref_count(page));
    }
  }
  CHECK_EQ(known, cached_pages());
  CHECK_EQ(reclaimable, static_cast<int64_t>(reclaimable_.size()));
}

}  // namespace nibble
