#include "kvcache/paged_kv_cache.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/check.h"
#include "core/buffer.h"

namespace nibble {

PagedKvCache::PagedKvCache(const KvCacheShape& shape, const Backend* backend)
    : shape_(shape), pools_(kv_pools(shape.layers)), places_(shape.layers.size()) {
  CHECK_EQ(shape.num_pages.size(), pools_.size());
  for (size_t pool = 0; pool < pools_.size(); ++pool) {
    place(pool, layer_page_bytes(pools_[pool].spec, shape.page_size, backend));
  }
}

// Gives the layers of a pool their pages.
void PagedKvCache::place(size_t pool, int64_t page_bytes) {
  const KvSpec& spec = pools_[pool].spec;
  for (size_t layer = 0; layer < places_.size(); ++layer) {
    const KvSpec& own = shape_.layers[layer];
    if (spec.is_residual() ? kv_has_residual(own.code) && residual_of(own) == spec : own == spec) {
      (spec.is_residual() ? places_[layer].residual : places_[layer].pages) = {
          .pool = static_cast<int32_t>(pool), .offset = bytes_};
      bytes_ += page_bytes * shape_.num_pages[pool];
    }
  }
}

Result<PagedKvCache> PagedKvCache::allocate(const KvCacheShape& shape) {
  PagedKvCache cache(shape, nullptr);
  const auto bytes = static_cast<size_t>(cache.bytes_);
  NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(bytes));
  const auto owner = std::make_shared<Buffer>(std::move(buffer));
  cache.memory_ = DeviceBuffer(owner->data(), bytes, [owner](void*) {});
  return cache;
}

Result<PagedKvCache> PagedKvCache::allocate(const KvCacheShape& shape, Backend& backend) {
  PagedKvCache cache(shape, &backend);
  NIBBLE_ASSIGN_OR_RETURN(cache.memory_, backend.allocate(static_cast<size_t>(cache.bytes_)));
  cache.program_ = backend.new_program();
  return cache;
}

KvView PagedKvCache::view(int64_t layer) const {
  CHECK_LT(layer, std::ssize(places_));
  const auto& [pages, residual] = places_[static_cast<size_t>(layer)];
  KvView view = view_of(shape_.layers[static_cast<size_t>(layer)], shape_.page_size);
  view.pages = memory_.as<std::byte>() + pages.offset;
  view.pool = pages.pool;
  if (kv_has_residual(view.code)) {
    view.residual = memory_.as<std::byte>() + residual.offset;
    view.residual_pool = residual.pool;
  }
  return view;
}

}  // namespace nibble
