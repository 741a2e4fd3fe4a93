#include "kvcache/kv_cache_shape.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/math.h"

namespace nibble {

namespace {

void add_layer(const KvSpec& spec, std::vector<KvPool>& pools) {
  const auto found =
      std::ranges::find_if(pools, [&](const KvPool& pool) { return pool.spec == spec; });
  if (found == pools.end()) {
    pools.push_back({.spec = spec, .num_layers = 1});
  } else {
    ++found->num_layers;
  }
}

}  // namespace

std::vector<KvPool> kv_pools(const std::vector<KvSpec>& layers) {
  std::vector<KvPool> pools;
  for (const KvSpec& spec : layers) {
    add_layer(spec, pools);
  }
  for (const KvSpec& spec : layers) {
    if (kv_has_residual(spec.code)) {
      add_layer(residual_of(spec), pools);
    }
  }
  return pools;
}

int64_t layer_page_bytes(const KvSpec& spec, int64_t page_size, const Backend* backend) {
  if (spec.is_residual()) {
    return page_size * spec.kv_heads * kv_row_bytes(spec.code, spec.key_dim);
  }
  const KvView view = view_of(spec, page_size);
  return backend != nullptr ? backend->kv_page_bytes(view) : view.page_bytes();
}

int64_t window_pages(int64_t window, int64_t page_size) {
  // From first_token_read() to the token itself; where it lies in its page is anybody's guess.
  return ceil_div(window + kKeyGroup - 1, page_size) + 1;
}

int64_t longest_sequence(int64_t window, int64_t page_size, int64_t pages) {
  const bool endless = window > 0 && pages >= window_pages(window, page_size);
  return endless ? std::numeric_limits<int64_t>::max() : pages * page_size;
}

KvView view_of(const KvSpec& spec, int64_t page_size) {
  return {.code = spec.code,
          .page_size = page_size,
          .kv_heads = spec.kv_heads,
          .head_dim = spec.key_dim,
          .basis = spec.latent ? KvBasis{} : basis_of(spec.code),
          .latent_rank = spec.latent_rank()};
}

KvCacheShape KvCacheShape::equal_pools(std::vector<KvSpec> layers,
                                       int64_t page_size,
                                       int64_t num_pages) {
  const size_t pools = kv_pools(layers).size();
  return {.layers = std::move(layers),
          .page_size = page_size,
          .num_pages = std::vector<int64_t>(pools, num_pages)};
}

std::vector<int64_t> KvCacheShape::page_bytes(const Backend* backend) const {
  std::vector<int64_t> bytes;
  for (const KvPool& pool : kv_pools(layers)) {
    bytes.push_back(layer_page_bytes(pool.spec, page_size, backend) * pool.num_layers);
  }
  return bytes;
}

int64_t KvCacheShape::bytes(const Backend* backend) const {
  const std::vector<int64_t> of_page = page_bytes(backend);
  CHECK_EQ(of_page.size(), num_pages.size());
  int64_t total = 0;
  for (size_t pool = 0; pool < of_page.size(); ++pool) {
    total += of_page[pool] * num_pages[pool];
  }
  return total;
}

std::string KvCacheShape::describe() const {
  std::string text;
  const std::vector<KvPool> pools = kv_pools(layers);
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    const KvSpec& spec = pools[pool].spec;
    const std::string window = spec.is_residual() ? ", keys that have no codes yet"
                               : spec.window > 0  ? fmt::format(" with a window of {}", spec.window)
                                                  : "";
    text += fmt::format("{}{} {}{}: {} pages of {} tokens", pool > 0 ? "; " : "",
                        pools[pool].num_layers, pools[pool].num_layers == 1 ? "layer" : "layers",
                        window, num_pages[pool], page_size);
  }
  return text;
}

int64_t KvCacheShape::sequences_of(int64_t length) const {
  int64_t most = std::numeric_limits<int64_t>::max();
  const std::vector<KvPool> pools = kv_pools(layers);
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    const int64_t window = pools[pool].spec.window;
    int64_t pages = ceil_div(length, page_size);
    pages = window > 0 ? std::min(pages, window_pages(window, page_size)) : pages;
    most = std::min(most, num_pages[pool] / pages);
  }
  return most;
}

namespace {

/// Whether rows of latent attention are kept in the format.
Status check_latent(const KvSpec& spec) {
  if (!spec.latent || kv_format(spec.code).latent.kept) {
    return {};
  }
  return make_error(
      StatusCode::kUnsupported,
      "--kv-cache-dtype {} has no form for latent attention: it keeps parameters of channels "
      "of keys and values, but a row of a latent is both at once; choose "
      "--kv-cache-dtype {}",
      kv_code_name(spec.code), latent_code_names());
}

}  // namespace

Status KvCacheShape::check(const Backend& backend, int64_t heads) const {
  for (const KvPool& pool : kv_pools(layers)) {
    const KvSpec& spec = pool.spec;
    if (spec.is_residual()) {
      continue;
    }
    if (spec.key_dim != spec.value_dim && !spec.latent) {
      return make_error(StatusCode::kUnsupported,
                        "{} of {} layers keep keys of {} and values of {} elements per head, but "
                        "{} computes attention over keys and values of equal size alone; such "
                        "models can be quantized, not run",
                        pool.num_layers, layers.size(), spec.key_dim, spec.value_dim,
                        backend.name());
    }
    NIBBLE_RETURN_IF_ERROR(check_latent(spec));
    NIBBLE_RETURN_IF_ERROR(backend.check_kv(view_of(spec, page_size), heads));
  }
  return {};
}

}  // namespace nibble
