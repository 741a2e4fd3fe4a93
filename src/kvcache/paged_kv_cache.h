#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "ops/kv.h"

namespace nibble {

struct KvCacheShape {
  KvCode code = KvCode::kBf16;
  int64_t num_layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t page_size = 16;  // tokens
  int64_t num_pages = 0;
};

/// The memory of all pages of all layers; who owns which page is BlockAllocator's affair.
class PagedKvCache final {
 public:
  /// In host memory, for CPUs. kResourceExhausted, naming the size, when it is not to be had.
  static Result<PagedKvCache> allocate(const KvCacheShape& shape);
  /// The same in the memory of `backend`.
  static Result<PagedKvCache> allocate(const KvCacheShape& shape, Backend& backend);

  [[nodiscard]] const KvCacheShape& shape() const { return shape_; }
  [[nodiscard]] KvView view(int64_t layer) const;
  /// StepPlan's number of the model that computes on this cache.
  [[nodiscard]] int64_t program() const { return program_; }
  /// Bytes of one page over all layers: in host memory, and in the memory of `backend`.
  [[nodiscard]] static int64_t page_bytes(const KvCacheShape& shape);
  [[nodiscard]] static int64_t page_bytes(const KvCacheShape& shape, const Backend& backend);

 private:
  KvCacheShape shape_;
  DeviceBuffer memory_;
  int64_t layer_bytes_ = 0;
  int64_t program_ = 0;
};

}  // namespace nibble
