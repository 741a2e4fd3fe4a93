#include "engine/page_shares.h"

#include <algorithm>

#include "base/math.h"

namespace nibble {

std::vector<int64_t> useful_pages(const EngineOptions& options, const std::vector<KvPool>& pools) {
  const int64_t all = ceil_div(options.max_model_len, options.page_size) * options.max_num_seqs;
  const int64_t step = ceil_div(options.max_num_batched_tokens, options.page_size);
  std::vector<int64_t> pages;
  for (const KvPool& pool : pools) {
    if (pool.spec.is_residual()) {  // of each the group that fills, and the next one's
      pages.push_back(std::min(all, 2 * options.max_num_seqs + step));
      continue;
    }
    const int64_t seen = window_pages(pool.spec.window, options.page_size) + 1;
    pages.push_back(
        pool.spec.window == 0 ? all : std::min(all, 2 * (seen * options.max_num_seqs + step)));
  }
  return pages;
}

Result<std::vector<int64_t>> share_pages(KvCacheShape shape,
                                         const std::vector<int64_t>& most,
                                         int64_t bytes,
                                         const Backend* backend) {
  const auto fits = [&](int64_t pages) {
    shape.num_pages.clear();
    for (const int64_t limit : most) {
      shape.num_pages.push_back(std::min(pages, limit));
    }
    return shape.bytes(backend) <= bytes;
  };
  if (!fits(1)) {
    return make_error(StatusCode::kResourceExhausted,
                      "one page of the KV cache takes {} bytes, more than --kv-cache-memory {}; "
                      "check the sizes in config.json",
                      shape.bytes(backend), bytes);
  }
  int64_t low = 1;
  int64_t high = bytes / std::ranges::min(shape.page_bytes(backend));
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    fits(middle) ? low = middle : high = middle - 1;
  }
  fits(low);
  return shape.num_pages;
}

}  // namespace nibble
