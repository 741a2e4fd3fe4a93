#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "ops/kv.h"

namespace nibble {

/// Layers of equal specs, which share pages: each page holds the same tokens of all of them.
struct KvPool {
  KvSpec spec;
  int64_t num_layers = 0;
};

/// The pools of a cache, in the order of their first layers; behind them those of residuals
/// (residual_of()).
[[nodiscard]] std::vector<KvPool> kv_pools(const std::vector<KvSpec>& layers);

/// Most pages of one sequence that hold what the computation of one token reads, where the pool has
/// a window. No sequence needs more for a token.
[[nodiscard]] int64_t window_pages(int64_t window, int64_t page_size);

struct KvCacheShape {
  std::vector<KvSpec> layers;
  int64_t page_size = 16;          // tokens of a page, in every pool
  std::vector<int64_t> num_pages;  // of each pool of kv_pools(layers)

  /// As many pages in each pool.
  static KvCacheShape equal_pools(std::vector<KvSpec> layers, int64_t page_size, int64_t num_pages);

  /// Bytes of one page of each pool, over its layers: in host memory, or in that of `backend`.
  [[nodiscard]] std::vector<int64_t> page_bytes(const Backend* backend = nullptr) const;
  /// Bytes of all pages.
  [[nodiscard]] int64_t bytes(const Backend* backend = nullptr) const;
  /// "14 layers: 900 pages of 64 tokens; 14 layers with a window of 512: 70 pages of 64 tokens".
  [[nodiscard]] std::string describe() const;
  /// How many sequences of `length` tokens fit at once.
  [[nodiscard]] int64_t sequences_of(int64_t length) const;
  /// Whether `backend` has kernels for all layers: kUnsupported and kInvalidArgument say what was
  /// found, what is known and what to do.
  ///   heads: of the queries
  [[nodiscard]] Status check(const Backend& backend, int64_t heads) const;
};

/// The longest sequence that fits by itself into `pages` pages of a pool.
[[nodiscard]] int64_t longest_sequence(int64_t window, int64_t page_size, int64_t pages);

/// Bytes of a page of one layer: in host memory, or in that of `backend`.
[[nodiscard]] int64_t layer_page_bytes(const KvSpec& spec,
                                       int64_t page_size,
                                       const Backend* backend);

/// What kernels know of a layer's pages, without their place.
[[nodiscard]] KvView view_of(const KvSpec& spec, int64_t page_size);

}  // namespace nibble
