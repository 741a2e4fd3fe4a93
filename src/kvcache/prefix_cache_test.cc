#include "kvcache/prefix_cache.h"

#include <random>
#include <set>

#include <gtest/gtest.h>

#include "base/check.h"
#include "ops/kv.h"

namespace nibble {
namespace {

using NodeId = PrefixCache::NodeId;

/// One pool of so many pages, without a window.
template <int64_t kPages>
constexpr PrefixCache::PoolSize kPools[] = {{.num_pages = kPages}};

std::vector<int32_t> chain(PrefixCache& cache, const std::vector<int32_t>& tokens, size_t size) {
  std::vector<int32_t> pages;
  NodeId node = PrefixCache::kRoot;
  for (size_t i = 0; i + size <= tokens.size(); i += size) {
    int32_t page = *cache.acquire(0);
    node = cache.insert(node, std::span(tokens).subspan(i, size), {&page, 1});
    pages.push_back(page);
  }
  return pages;
}

void release_all(PrefixCache& cache, const std::vector<int32_t>& pages) {
  for (auto it = pages.rbegin(); it != pages.rend(); ++it) {
    cache.release(0, *it);
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
  PrefixCache cache(kPools<8>, 2);
  release_all(cache, chain(cache, {1, 2, 3, 4, 5, 6}, 2));
  EXPECT_EQ(cache.pool(0).cached_pages(), 3);
  EXPECT_EQ(cache.pool(0).available_pages(), 8);
  const std::vector<int32_t> longer = {1, 2, 3, 4, 9, 9, 5, 6};
  auto match = cache.match(longer, 8);
  EXPECT_EQ(match.pages, 2);
  EXPECT_EQ(cache.pool(0).available_pages(), 6);
  cache.check_integrity();
  release_all(cache, match.lists[0].pages);
  EXPECT_EQ(cache.match(longer, 3).pages, 1);
  // The same tokens after another beginning are another page.
  EXPECT_EQ(cache.match(std::vector<int32_t>{3, 4, 5, 6}, 4).pages, 0);
}

TEST(PrefixCache, EqualPagesBecomeOne) {
  PrefixCache cache(kPools<8>, 2);
  const auto first = chain(cache, {1, 2, 3, 4}, 2);
  const auto second = chain(cache, {1, 2, 3, 4}, 2);
  EXPECT_EQ(first, second);
  EXPECT_EQ(cache.pool(0).allocator().free_pages(), 6);
  EXPECT_EQ(cache.pool(0).allocator().ref_count(first[0]), 3);
  release_all(cache, first);
  release_all(cache, second);
  cache.check_integrity();
}

TEST(PrefixCache, EvictsTheLeastRecentlyUsedEndFirst) {
  PrefixCache cache(kPools<4>, 1);
  release_all(cache, chain(cache, {1, 2}, 1));
  release_all(cache, chain(cache, {3, 4}, 1));
  release_all(cache, cache.match(std::vector<int32_t>{1}, 1).lists[0].pages);  // now the newest
  const auto lengths = [&] {
    std::vector<int64_t> out;
    for (const auto& tokens : {std::vector<int32_t>{1, 2}, std::vector<int32_t>{3, 4}}) {
      const auto match = cache.match(tokens, 2);
      out.push_back(match.pages);
    }
    return out;
  };
  const int32_t taken = *cache.acquire(0);
  cache.check_integrity();
  EXPECT_EQ(lengths(), (std::vector<int64_t>{1, 2}));  // also holds 1, 3 and 4 from here on
  EXPECT_FALSE(cache.acquire(0));
  cache.release(0, taken);
  EXPECT_TRUE(cache.acquire(0));
}

TEST(PrefixCache, CollidingHashesNeverMatchOtherTokens) {
  PrefixCache cache(kPools<32>, 1, [](NodeId, std::span<const int32_t>) { return uint64_t{42}; });
  const auto a = chain(cache, {1, 2, 3}, 1);
  const auto b = chain(cache, {2, 3, 1}, 1);
  const auto c = chain(cache, {1, 3, 3}, 1);
  EXPECT_EQ(cache.pool(0).cached_pages(), 8);  // only the first page of a and c is shared
  EXPECT_EQ(a[0], c[0]);
  EXPECT_EQ(cache.match(std::vector<int32_t>{1, 2, 3}, 3).lists[0].pages, a);
  EXPECT_EQ(cache.match(std::vector<int32_t>{2, 3, 1}, 3).lists[0].pages, b);
  EXPECT_EQ(cache.match(std::vector<int32_t>{1, 3, 3}, 3).lists[0].pages, c);
  EXPECT_EQ(cache.match(std::vector<int32_t>{3, 1, 2}, 3).pages, 0);
  cache.check_integrity();
}

TEST(PrefixCache, ClearDetachesWhatSequencesHold) {
  PrefixCache cache(kPools<4>, 1);
  int32_t page = *cache.acquire(0);
  const NodeId node = cache.insert(PrefixCache::kRoot, std::vector<int32_t>{1}, {&page, 1});
  cache.clear();
  EXPECT_EQ(cache.nodes(), 0);
  EXPECT_EQ(cache.pool(0).allocator().ref_count(page), 1);
  int32_t child = *cache.acquire(0);
  EXPECT_EQ(cache.insert(node, std::vector<int32_t>{2}, {&child, 1}), PrefixCache::kDetached);
  cache.release(0, child);
  cache.release(0, page);
  EXPECT_EQ(cache.pool(0).allocator().free_pages(), 4);
  cache.check_integrity();
}

TEST(PrefixCache, DisabledCachesNothing) {
  PrefixCache cache(kPools<4>, 0);
  int32_t page = *cache.acquire(0);
  EXPECT_EQ(cache.insert(PrefixCache::kRoot, std::vector<int32_t>{1}, {&page, 1}),
            PrefixCache::kDetached);
  cache.release(0, page);
  EXPECT_EQ(cache.match(std::vector<int32_t>{1, 2}, 2).pages, 0);
  EXPECT_EQ(cache.pool(0).allocator().free_pages(), 4);
}

/// Pages of 64 tokens, of which page i is 64 times i.
constexpr int64_t kPage = kKeyGroup;
std::vector<int32_t> long_text(int64_t pages) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < pages * kPage; ++i) {
    tokens.push_back(static_cast<int32_t>(i / kPage));
  }
  return tokens;
}

/// Computes a text as a sequence does: gives pages of the last pool back that its window has left.
std::vector<PrefixCache::PageList> compute(PrefixCache& cache, int64_t pages) {
  const std::vector<int32_t> tokens = long_text(pages);
  std::vector<PrefixCache::PageList> lists(static_cast<size_t>(cache.num_pools()));
  NodeId node = PrefixCache::kRoot;
  for (int64_t i = 0; i < pages; ++i) {
    std::vector<int32_t> own;
    for (int64_t pool = 0; pool < cache.num_pools(); ++pool) {
      own.push_back(cache.acquire(pool).value());
    }
    node =
        cache.insert(node, std::span(tokens).subspan(static_cast<size_t>(i * kPage), kPage), own);
    EXPECT_NE(node, PrefixCache::kDetached);
    for (int64_t pool = 0; pool < cache.num_pools(); ++pool) {
      PrefixCache::PageList& list = lists[static_cast<size_t>(pool)];
      list.pages.push_back(own[static_cast<size_t>(pool)]);
      const int64_t window = cache.pool(pool).window();
      for (; list.first < first_token_read(window, (i + 1) * kPage) / kPage; ++list.first) {
        cache.release(pool, list.pages[static_cast<size_t>(list.first)]);
      }
    }
    cache.check_integrity();
  }
  return lists;
}

void release_lists(PrefixCache& cache, const std::vector<PrefixCache::PageList>& lists) {
  for (size_t pool = 0; pool < lists.size(); ++pool) {
    for (int64_t i = std::ssize(lists[pool].pages) - 1; i >= lists[pool].first; --i) {
      cache.release(static_cast<int64_t>(pool), lists[pool].pages[static_cast<size_t>(i)]);
    }
  }
}

// A window of two pages before each: the next token behind page n reads pages n - 2 and n - 1.
constexpr int64_t kWindow = 2 * kPage + 1;

TEST(PrefixCache, PoolsWithWindowsNeedTheLastWindowAlone) {
  const PrefixCache::PoolSize pools[] = {{.num_pages = 16}, {.num_pages = 4, .window = kWindow}};
  PrefixCache cache(pools, kPage);
  const auto lists = compute(cache, 10);  // the second pool evicts its oldest pages meanwhile
  EXPECT_EQ(lists[1].first, 8);
  EXPECT_EQ(cache.nodes(), 10);
  EXPECT_EQ(cache.pool(1).cached_pages(), 4);
  release_lists(cache, lists);
  cache.check_integrity();

  // All ten pages serve; of the second pool the last two are held.
  auto match = cache.match(long_text(11), 10 * kPage);
  EXPECT_EQ(match.pages, 10);
  EXPECT_EQ(match.lists[0].pages, lists[0].pages);
  EXPECT_EQ(match.lists[1].first, 8);
  EXPECT_EQ(std::ssize(match.lists[1].pages), 10);
  EXPECT_EQ(match.lists[1].pages[8], lists[1].pages[8]);
  EXPECT_EQ(cache.pool(1).available_pages(), 2);
  release_lists(cache, match.lists);
  // With pages 6 to 9 left, a text that leaves after eight pages can use all of them, one that
  // leaves after seven can use none: page 5 is gone.
  match = cache.match(long_text(10), 8 * kPage);
  EXPECT_EQ(match.pages, 8);
  EXPECT_EQ(match.lists[1].first, 6);
  release_lists(cache, match.lists);
  EXPECT_EQ(cache.match(long_text(10), 7 * kPage).pages, 0);
  cache.check_integrity();
}

TEST(PrefixCache, ALostPageComesBackWithTheNextSequence) {
  const PrefixCache::PoolSize pools[] = {{.num_pages = 32}, {.num_pages = 4, .window = kWindow}};
  PrefixCache cache(pools, kPage);
  release_lists(cache, compute(cache, 10));
  EXPECT_EQ(cache.match(long_text(4), 3 * kPage).pages, 0);
  const auto again = compute(cache, 3);  // the same nodes, with pages of its own in the second pool
  EXPECT_EQ(cache.nodes(), 10);
  release_lists(cache, again);
  EXPECT_EQ(cache.match(long_text(4), 3 * kPage).pages, 3);
  cache.check_integrity();
}

// Without a pool that keeps all, nodes without pages lead to those that have some, and go with
// them.
TEST(PrefixCache, WindowsInAllPools) {
  const PrefixCache::PoolSize pools[] = {{.num_pages = 4, .window = kWindow}};
  PrefixCache cache(pools, kPage);
  const auto lists = compute(cache, 50);
  release_lists(cache, lists);
  EXPECT_EQ(cache.nodes(), 50);
  auto match = cache.match(long_text(51), 50 * kPage);
  EXPECT_EQ(match.pages, 50);
  EXPECT_EQ(match.lists[0].first, 48);
  release_lists(cache, match.lists);
  std::vector<int32_t> taken;
  while (const auto page = cache.acquire(0)) {
    taken.push_back(*page);
    cache.check_integrity();
  }
  EXPECT_EQ(taken.size(), 4U);
  EXPECT_EQ(cache.nodes(), 0);
}

// A page of the pool that keeps all takes those of the others with it.
TEST(PrefixCache, EvictionsReachAllPools) {
  const PrefixCache::PoolSize pools[] = {{.num_pages = 3},
                                         {.num_pages = 8, .window = 1000 * kPage}};
  PrefixCache cache(pools, kPage);
  release_lists(cache, compute(cache, 3));
  EXPECT_EQ(cache.pool(1).cached_pages(), 3);
  EXPECT_TRUE(cache.acquire(0));
  cache.check_integrity();
  EXPECT_EQ(cache.nodes(), 2);
  EXPECT_EQ(cache.pool(1).cached_pages(), 2);
  EXPECT_EQ(cache.match(long_text(3), 3 * kPage).pages, 2);
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
