#pragma once

#include <cstdint>

#include "core/buffer.h"
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
  /// kResourceExhausted, naming the size, when the memory is not to be had.
  static Result<PagedKvCache> allocate(const KvCacheShape& shape);

  [[nodiscard]] const KvCacheShape& shape() const { return shape_; }
  [[nodiscard]] KvView view(int64_t layer);
  /// Bytes of one page over all layers.
  [[nodiscard]] static int64_t page_bytes(const KvCacheShape& shape);

 private:
  KvCacheShape shape_;
  Buffer memory_;
};

}  // namespace nibble
