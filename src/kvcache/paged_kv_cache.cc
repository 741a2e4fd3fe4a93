#include "kvcache/paged_kv_cache.h"

namespace nibble {
namespace {

KvView layer_view(const KvCacheShape& shape, std::byte* pages) {
  return {shape.code, shape.page_size, shape.kv_heads, shape.head_dim, pages};
}

}  // namespace

int64_t PagedKvCache::page_bytes(const KvCacheShape& shape) {
  return layer_view(shape, nullptr).page_bytes() * shape.num_layers;
}

Result<PagedKvCache> PagedKvCache::allocate(const KvCacheShape& shape) {
  PagedKvCache cache;
  cache.shape_ = shape;
  const auto bytes = static_cast<size_t>(page_bytes(shape) * shape.num_pages);
  NIBBLE_ASSIGN_OR_RETURN(cache.memory_, Buffer::allocate(bytes));
  return cache;
}

KvView PagedKvCache::view(int64_t layer) {
  CHECK_LT(layer, shape_.num_layers);
  const int64_t layer_bytes = layer_view(shape_, nullptr).page_bytes() * shape_.num_pages;
  return layer_view(shape_, memory_.data() + layer * layer_bytes);
}

}  // namespace nibble
