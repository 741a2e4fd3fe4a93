#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "kvcache/kv_cache_shape.h"

namespace nibble {

/// The memory of all pages of all layers, pool after pool; who owns which page is the affair of
/// PrefixCache.
class PagedKvCache final {
 public:
  /// In host memory, for CPUs. kResourceExhausted, naming the size, when it is not to be had.
  static Result<PagedKvCache> allocate(const KvCacheShape& shape);
  /// The same in the memory of `backend`.
  static Result<PagedKvCache> allocate(const KvCacheShape& shape, Backend& backend);

  [[nodiscard]] const KvCacheShape& shape() const { return shape_; }
  [[nodiscard]] int64_t num_pools() const { return static_cast<int64_t>(pools_.size()); }
  [[nodiscard]] KvView view(int64_t layer) const;
  /// StepPlan's number of the model that computes on this cache.
  [[nodiscard]] int64_t program() const { return program_; }

 private:
  struct Place {
    int32_t pool = 0;
    int64_t offset = 0;  // of its pages, in bytes
  };
  struct LayerPlaces {
    Place pages;
    Place residual;  // of layers that have one
  };

  PagedKvCache(const KvCacheShape& shape, const Backend* backend);
  void place(size_t pool, int64_t page_bytes);

  KvCacheShape shape_;
  std::vector<KvPool> pools_;
  std::vector<LayerPlaces> places_;  // by layer
  int64_t bytes_ = 0;
  DeviceBuffer memory_;
  int64_t program_ = 0;
};

}  // namespace nibble
