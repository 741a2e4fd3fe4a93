#include "backend/cpu/kv_rows.h"

#include <string_view>

#include "base/check.h"

namespace nibble::cpu {
namespace {

/// Rows of latent attention, which are keys and values: those in codes are widened.
void set_latent(const KvView& kv, KvLayout& layout) {
  const LatentParameters latent = kv_format(kv.code).latent;
  CHECK(latent.kept && kv.basis == KvBasis());
  CHECK_EQ(kv.latent_rank % 8, 0);
  layout.kernel = latent.parameters > 0 ? kBf16Code : layout.code;
  layout.value_dim = layout.latent_rank = kv.latent_rank;
  layout.latent_group = latent.group > 0 ? latent.group : kv.latent_rank;
  layout.keys = {.sets = kv.params_offset(),
                 .set_bytes = latent_param_bytes(kv.code, kv.latent_rank)};
  layout.values = layout.keys;
}

}  // namespace

KvLayout layout_of(const KvView& kv) {
  static_assert(
      static_cast<int>(KvCode::kF32) == 0 && static_cast<int>(KvCode::kBf16) == kBf16Code &&
      static_cast<int>(KvCode::kInt8) == kInt8Code &&
      static_cast<int>(KvCode::kInt4) == kInt4Code && static_cast<int>(KvCode::kFp8) == 4 &&
      static_cast<int>(KvCode::kInt4Page) == kPageCode &&
      static_cast<int>(KvCode::kInt4Static) == kStaticCode);
  CHECK_EQ(kv.head_dim % 8, 0);
  CHECK_LE(kv.head_dim, kMaxHeadDim);
  KvLayout layout;
  layout.pages = reinterpret_cast<uint8_t*>(kv.pages);
  layout.code = static_cast<int64_t>(kv.code);
  const KvParameters per = kv_format(kv.code).per;
  const bool own = per == KvParameters::kNone || per == KvParameters::kPerTokenHead;
  CHECK_EQ(per == KvParameters::kPerChannel,
           kv.basis.key_step != nullptr && kv.basis.value_step != nullptr);
  layout.kernel = own ? layout.code : kBf16Code;
  layout.page_size = kv.page_size;
  layout.page_bytes = kv.page_bytes();
  layout.head_bytes = kv.head_bytes();
  layout.row_bytes = kv.row_bytes();
  layout.head_dim = kv.head_dim;
  if (kv.latent()) {
    set_latent(kv, layout);
    return layout;
  }
  layout.value_dim = kv.head_dim;
  layout.row_params = kv_row_params(kv.code);
  layout.keys = {.sets = kv.params_offset(), .set_bytes = 4 * layout.row_params};
  layout.values = layout.keys;
  layout.values.rows += kv.key_bytes();
  layout.values.sets += kv.key_bytes();
  if (kv_has_residual(kv.code)) {
    CHECK_EQ(kv.page_size % kChannelTokens, 0);
    CHECK(kv.residual != nullptr);
    layout.keys.set_bytes = 2 * int64_t{kv_format(kv.code).parameters} * kv.head_dim;
    layout.keys.set_tokens = kChannelTokens;
    layout.values.set_bytes = 2 * int64_t{kv_format(kv.code).parameters};
    layout.residual = reinterpret_cast<const uint8_t*>(kv.residual);
    layout.residual_page_bytes = kv.residual_page_bytes();
  }
  return layout;
}

Status check_kv(const KvView& kv, int64_t heads) {
  if (kv_has_residual(kv.code) && kv.page_size % kChannelTokens != 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "a cache in {} has pages of whole groups of {} tokens, not of {}; choose "
                      "--block-size {}",
                      kv_code_name(kv.code), kChannelTokens, kv.page_size, kChannelTokens);
  }
  constexpr std::string_view kRemedy = "such models can be quantized, not run";
  if (kv.head_dim % 8 != 0 || kv.head_dim > kMaxHeadDim) {
    return make_error(StatusCode::kUnsupported,
                      "attention on CPUs takes {} of up to {} numbers, in multiples of 8; this "
                      "model has {}: {}",
                      kv.latent() ? "latent rows" : "heads", kMaxHeadDim, kv.head_dim, kRemedy);
  }
  if (kv.latent() && kv.latent_rank % 8 != 0) {
    return make_error(StatusCode::kUnsupported,
                      "latent attention on CPUs takes latents and rotated keys in multiples of 8 "
                      "numbers; this model has {} and {}: {}",
                      kv.latent_rank, kv.rope_dim(), kRemedy);
  }
  if (heads > kv.kv_heads * kQueryRows) {
    return make_error(StatusCode::kUnsupported,
                      "attention on CPUs takes up to {} query heads for each head of the cache; "
                      "this model has {} for {}: {}",
                      kQueryRows, heads, kv.kv_heads, kRemedy);
  }
  return {};
}

}  // namespace nibble::cpu
