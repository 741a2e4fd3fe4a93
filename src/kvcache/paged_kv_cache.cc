#include "kvcache/paged_kv_cache.h"

#include <memory>
#include <utility>

#include "base/check.h"
#include "core/buffer.h"

namespace nibble {
namespace {

KvView page_shape(const KvCacheShape& shape) {
  return {shape.code, shape.page_size, shape.kv_heads, shape.head_dim, nullptr};
}

}  // namespace

int64_t PagedKvCache::page_bytes(const KvCacheShape& shape) {
  return page_shape(shape).page_bytes() * shape.num_layers;
}

int64_t PagedKvCache::page_bytes(const KvCacheShape& shape, const Backend& backend) {
  return backend.kv_page_bytes(page_shape(shape)) * shape.num_layers;
}

Result<PagedKvCache> PagedKvCache::allocate(const KvCacheShape& shape) {
  PagedKvCache cache;
  cache.shape_ = shape;
  cache.layer_bytes_ = page_shape(shape).page_bytes() * shape.num_pages;
  const auto bytes = static_cast<size_t>(cache.layer_bytes_ * shape.num_layers);
  NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(bytes));
  const auto owner = std::make_shared<Buffer>(std::move(buffer));
  cache.memory_ = DeviceBuffer(owner->data(), bytes, [owner](void*) {});
  return cache;
}

Result<PagedKvCache> PagedKvCache::allocate(const KvCacheShape& shape, Backend& backend) {
  PagedKvCache cache;
  cache.shape_ = shape;
  cache.layer_bytes_ = backend.kv_page_bytes(page_shape(shape)) * shape.num_pages;
  const auto bytes = static_cast<size_t>(cache.layer_bytes_ * shape.num_layers);
  NIBBLE_ASSIGN_OR_RETURN(cache.memory_, backend.allocate(bytes));
  cache.program_ = backend.new_program();
  return cache;
}

KvView PagedKvCache::view(int64_t layer) const {
  CHECK_LT(layer, shape_.num_layers);
  KvView view = page_shape(shape_);
  view.pages = memory_.as<std::byte>() + layer * layer_bytes_;
  return view;
}

}  // namespace nibble
