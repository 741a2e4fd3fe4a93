#include "kvcache/prefix_cache.h"

#include <random>
#include <set>

#include <gtest/gtest.h>

#include "base/check.h"

namespace nibble {
namespace {

using NodeId = PrefixCache::NodeId;

std::vector<int32_t> chain(PrefixCache& cache, const std::vector<int32_t>& tokens, size_t size) {
  std::vector<int32_t> pages;
  NodeId node = PrefixCache::kRoot;
  for (size_t i = 0; i + size <= tokens.size(); i += size) {
    const auto inserted = cache.insert(node, std::span(tokens).subspan(i, size), *cache.acquire());
    pages.push_back(inserted.page);
    node = inserted.node;
  }
  return pages;
}

void release_all(PrefixCache& cache, const std::vector<int32_t>& pages) {
  for (auto it = pages.rbegin(); it != pages.rend(); ++it) {
    cache.release(*it);
  }
}

TEST(BlockAllocator, CountsReferences) {
  BlockAllocator allocator(2);
  const int32_t a = *allocator.allocate();
  const int32_t b = *allocator.allocate();
  EXPECT_NE(a, b);
  EXPECT_FALSE(allocator.allocate());
  allocator.retain(a);
  EXPECT_FALSE(allocator.release(a));
  EXPECT_TRUE(allocator.release(a));
  EXPECT_EQ(allocator.free_pages(), 1);
  EXPECT_THROW((void)allocator.release(a), InternalError);
  EXPECT_THROW(allocator.retain(a), InternalError);
  EXPECT_THROW((void)allocator.ref_count(2), InternalError);
  allocator.check_integrity();
}

TEST(PrefixCache, MatchesTheLongestChain) {
  BlockAllocator allocator(8);
  PrefixCache cache(allocator, 2);
  release_all(cache, chain(cache, {1, 2, 3, 4, 5, 6}, 2));
  EXPECT_EQ(cache.cached_pages(), 3);
  EXPECT_EQ(cache.available_pages(), 8);
  const std::vector<int32_t> longer = {1, 2, 3, 4, 9, 9, 5, 6};
  auto match = cache.match(longer, 8);
  EXPECT_EQ(match.pages.size(), 2U);
  EXPECT_EQ(cache.available_pages(), 6);
  cache.check_integrity();
  release_all(cache, match.pages);
  EXPECT_EQ(cache.match(longer, 3).pages.size(), 1U);
  // The same tokens after another beginning are another page.
  EXPECT_TRUE(cache.match(std::vector<int32_t>{3, 4, 5, 6}, 4).pages.empty());
}

TEST(PrefixCache, EqualPagesBecomeOne) {
  BlockAllocator allocator(8);
  PrefixCache cache(allocator, 2);
  const auto first = chain(cache, {1, 2, 3, 4}, 2);
  const auto second = chain(cache, {1, 2, 3, 4}, 2);
  EXPECT_EQ(first, second);
  EXPECT_EQ(allocator.free_pages(), 6);
  EXPECT_EQ(allocator.ref_count(first[0]), 3);
  release_all(cache, first);
  release_all(cache, second);
  cache.check_integrity();
}

TEST(PrefixCache, EvictsTheLeastRecentlyUsedEndFirst) {
  BlockAllocator allocator(4);
  PrefixCache cache(allocator, 1);
  release_all(cache, chain(cache, {1, 2}, 1));
  release_all(cache, chain(cache, {3, 4}, 1));
  release_all(cache, cache.match(std::vector<int32_t>{1}, 1).pages);  // now the newest
  const auto lengths = [&] {
    std::vector<size_t> out;
    for (const auto& tokens : {std::vector<int32_t>{1, 2}, std::vector<int32_t>{3, 4}}) {
      const auto match = cache.match(tokens, 2);
      out.push_back(match.pages.size());
    }
    return out;
  };
  const int32_t taken = *cache.acquire();
  cache.check_integrity();
  EXPECT_EQ(lengths(), (std::vector<size_t>{1, 2}));  // also holds 1, 3 and 4 from here on
  EXPECT_FALSE(cache.acquire());
  cache.release(taken);
  EXPECT_TRUE(cache.acquire());
}

TEST(PrefixCache, CollidingHashesNeverMatchOtherTokens) {
  BlockAllocator allocator(32);
  PrefixCache cache(allocator, 1, [](NodeId, std::span<const int32_t>) { return uint64_t{42}; });
  const auto a = chain(cache, {1, 2, 3}, 1);
  const auto b = chain(cache, {2, 3, 1}, 1);
  const auto c = chain(cache, {1, 3, 3}, 1);
  EXPECT_EQ(cache.cached_pages(), 8);  // only the first page of a and c is shared
  EXPECT_EQ(a[0], c[0]);
  EXPECT_EQ(cache.match(std::vector<int32_t>{1, 2, 3}, 3).pages, a);
  EXPECT_EQ(cache.match(std::vector<int32_t>{2, 3, 1}, 3).pages, b);
  EXPECT_EQ(cache.match(std::vector<int32_t>{1, 3, 3}, 3).pages, c);
  EXPECT_TRUE(cache.match(std::vector<int32_t>{3, 1, 2}, 3).pages.empty());
  cache.check_integrity();
}

TEST(PrefixCache, ClearDetachesWhatSequencesHold) {
  BlockAllocator allocator(4);
  PrefixCache cache(allocator, 1);
  const int32_t page = *cache.acquire();
  const auto inserted = cache.insert(PrefixCache::kRoot, std::vector<int32_t>{1}, page);
  cache.clear();
  EXPECT_EQ(cache.cached_pages(), 0);
  EXPECT_EQ(allocator.ref_count(page), 1);
  const int32_t child = *cache.acquire();
  EXPECT_EQ(cache.insert(inserted.node, std::vector<int32_t>{2}, child).node,
            PrefixCache::kDetached);
  cache.release(child);
  cache.release(page);
  EXPECT_EQ(allocator.free_pages(), 4);
  cache.check_integrity();
}

TEST(PrefixCache, DisabledCachesNothing) {
  BlockAllocator allocator(4);
  PrefixCache cache(allocator, 0);
  const int32_t page = *cache.acquire();
  EXPECT_EQ(cache.insert(PrefixCache::kRoot, std::vector<int32_t>{1}, page).node,
            PrefixCache::kDetached);
  cache.release(page);
  EXPECT_TRUE(cache.match(std::vector<int32_t>{1, 2}, 2).pages.empty());
  EXPECT_EQ(allocator.free_pages(), 4);
}

TEST(PrefixCache, HashSpreadsNearbyPages) {
  std::set<uint64_t> seen;
  for (NodeId parent = -1; parent < 50; ++parent) {
    for (int32_t a = 0; a < 50; ++a) {
      for (int32_t b = 0; b < 50; ++b) {
        seen.insert(PrefixCache::hash_page(parent, std::vector<int32_t>{a, b}));
      }
    }
  }
  EXPECT_EQ(seen.size(), 51U * 50U * 50U);
}

}  // namespace
}  // namespace nibble
