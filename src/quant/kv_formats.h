#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "quant/head_form.h"

namespace nibble {

/// How cached keys and values are coded; kv_format() says what each code means.
enum class KvCode : uint8_t { kF32, kBf16, kInt8, kInt4, kFp8, kInt4Page, kInt4Static };

/// All codes, in the order that messages and tables list them.
inline constexpr std::array kKvCodes = {KvCode::kF32,       KvCode::kBf16, KvCode::kFp8,
                                        KvCode::kInt8,      KvCode::kInt4, KvCode::kInt4Page,
                                        KvCode::kInt4Static};

/// What one set of parameters of a cache belongs to: nothing; a token of one head; of keys a
/// channel of one head over kChannelTokens tokens, of values a token of one head; a channel of one
/// head over all tokens; or all tokens of a layer. The last two are the layer's, not the cache's.
enum class KvParameters : uint8_t {
  kNone,
  kPerTokenHead,
  kPerChannelPage,
  kPerChannel,
  kPerTensor
};

/// Tokens, from a multiple of as many on, whose keys share the parameters of kPerChannelPage. Until
/// the last of them is there, their keys are kept in BF16 (KvSpec's residual), and queries among
/// them read these; later queries read codes.
inline constexpr int64_t kChannelTokens = 64;

/// How the elements of a row lie in its bytes: one after the other, or two in a byte, the first in
/// the low nibble.
enum class KvOrder : uint8_t { kWhole, kLowNibbleFirst };

/// How a format keeps a token of latent attention (ops/latent.h): codes of the latent, in as many
/// bits as those of heads, behind them the rotated key in BF16, and parameters of the latent alone.
/// Of formats without parameters the whole row is of one type. Memory layouts of CPUs; those of
/// GPUs are in backend/cuda/latent.h.
struct LatentParameters {
  bool kept = false;       // whether the format has a form for such rows
  int32_t group = 0;       // numbers of the latent that share a set; 0: all of it is one
  int32_t parameters = 0;  // of a set: none, a scale, or a scale and an offset
  int32_t bytes = 0;       // of each: 4 is f32, 2 is fp16
};

/// One row of the table of cache formats. Memory layouts, flags, messages, reports and plans ask
/// it. Parameters are fp16 on GPUs; on CPUs they are f32, of int4_page fp16.
struct KvFormat {
  const char* name = "";  // device code asks for sizes: nvcc 13 miscompiles a string_view there
  int32_t bits = 0;       // per element
  KvParameters per = KvParameters::kNone;
  int32_t parameters = 0;  // of each set, of K as of V: none, a scale, or a scale and an offset
  KvOrder order = KvOrder::kWhole;
  // Codes are of what HeadForm makes of keys and values: of heads that hadamard() has turned unless
  // a layer says otherwise (checkpoint/kv_sidecar.h). Other formats keep them as they are.
  bool turned = false;
  // By how much attention may differ from that over the numbers themselves: three times what
  // rounding keys and values of a root mean square of 1.2 costs, as self-tests of GPUs make them.
  double tolerance = 0.02;
  LatentParameters latent = {};
};

/// int8: scale = absmax / 127, value = code * scale. int4: value = code * scale + offset, codes
/// 0..15; the CPU clips the range min..max around its middle to 1, 0.92 and 0.84 of it, takes the
/// int4 codes of each, a least-squares line through these, that line's nearest codes and so on,
/// three times, and stores the best line's nearest codes with the line through them. fp8: e4m3,
/// value = code * scale, where KvScales has the scale; values past 448 times the scale are clipped.
/// int4_page: as int4, but of keys the lines are those of a channel's kChannelTokens keys, rounded
/// to BF16 before; parameters are rounded to fp16, codes are the nearest on the rounded line.
/// int4_static: value = (code - 8) * step + mean, code from 0 to 15, with the layer's step of each
/// channel and its mean (ops/kv.h: KvBasis); values outside of that are clipped.
/// Of latents (LatentParameters), never turned: int8 as of heads; fp8: scale = absmax / 448 of the
/// token, value = code * scale; int4: the line of each group as that of a value of int4_page. What
/// codes make is rounded to BF16 before it is multiplied.
[[nodiscard]] constexpr KvFormat kv_format(KvCode code) {
  switch (code) {
    case KvCode::kF32:
      return {.name = "f32", .bits = 32, .latent = {.kept = true}};
    case KvCode::kBf16:
      return {.name = "bf16", .bits = 16, .latent = {.kept = true}};
    case KvCode::kInt8:
      return {.name = "int8",
              .bits = 8,
              .per = KvParameters::kPerTokenHead,
              .parameters = 1,
              .tolerance = 0.03,  // step 2 / 127
              .latent = {.kept = true, .parameters = 1, .bytes = 4}};
    case KvCode::kInt4:
      return {.name = "int4",
              .bits = 4,
              .per = KvParameters::kPerTokenHead,
              .parameters = 2,
              .order = KvOrder::kLowNibbleFirst,
              .turned = true,
              .tolerance = 0.3,  // step 4 / 15
              .latent = {.kept = true, .group = 128, .parameters = 2, .bytes = 2}};
    case KvCode::kInt4Page:
      return {.name = "int4_page",
              .bits = 4,
              .per = KvParameters::kPerChannelPage,
              .parameters = 2,
              .order = KvOrder::kLowNibbleFirst,
              .turned = true,
              .tolerance = 0.3};
    case KvCode::kInt4Static:
      return {.name = "int4_static",
              .bits = 4,
              .per = KvParameters::kPerChannel,
              .order = KvOrder::kLowNibbleFirst,
              .turned = true,
              .tolerance = 0.4};  // step 4.8 / 15
    case KvCode::kFp8:
      return {.name = "fp8",
              .bits = 8,
              .per = KvParameters::kPerTensor,
              .parameters = 1,
              .tolerance = 0.12,  // three bits of mantissa
              .latent = {.kept = true, .parameters = 1, .bytes = 4}};
  }
  return {};
}

/// What flags, metrics, reports and messages call a cache's format.
[[nodiscard]] constexpr std::string_view kv_code_name(KvCode code) { return kv_format(code).name; }

/// Their names: "f32, bf16, fp8, int8, int4, int4_page, int4_static".
[[nodiscard]] std::string kv_code_names(std::span<const KvCode> codes = kKvCodes);

/// The formats that have a form for rows of latent attention: "f32, bf16, fp8, int8, int4".
[[nodiscard]] std::string latent_code_names();

/// Bytes of one head's codes for one token.
[[nodiscard]] constexpr int64_t kv_row_bytes(KvCode code, int64_t head_dim) {
  return head_dim * kv_format(code).bits / 8;
}

/// Parameters of one head for one token, of K as of V.
[[nodiscard]] constexpr int64_t kv_row_params(KvCode code) {
  const KvFormat format = kv_format(code);
  return format.per == KvParameters::kPerTokenHead ? format.parameters : 0;
}

/// Whether keys are kept in BF16 until their group of kChannelTokens is full.
[[nodiscard]] constexpr bool kv_has_residual(KvCode code) {
  return kv_format(code).per == KvParameters::kPerChannelPage;
}

/// Bytes of one head's keys, of `tokens` neighbouring tokens, on a CPU, parameters included; of
/// kPerChannelPage whole groups of kChannelTokens.
[[nodiscard]] constexpr int64_t kv_key_bytes(KvCode code, int64_t head_dim, int64_t tokens) {
  const int64_t sets = kv_has_residual(code) ? tokens / kChannelTokens * head_dim : 0;
  return tokens * (kv_row_bytes(code, head_dim) + 4 * kv_row_params(code)) +
         2 * kv_format(code).parameters * sets;
}

/// The same of values.
[[nodiscard]] constexpr int64_t kv_value_bytes(KvCode code, int64_t head_dim, int64_t tokens) {
  const int64_t own = kv_has_residual(code) ? 2 * kv_format(code).parameters : 0;
  return tokens * (kv_row_bytes(code, head_dim) + 4 * kv_row_params(code) + own);
}

/// Bytes of one head's keys and values for one token on a CPU, parameters included, on average.
[[nodiscard]] constexpr double kv_token_bytes(KvCode code, int64_t head_dim) {
  return static_cast<double>(kv_key_bytes(code, head_dim, kChannelTokens) +
                             kv_value_bytes(code, head_dim, kChannelTokens)) /
         kChannelTokens;
}

/// Bytes of a token of latent attention on a CPU: a latent of `rank` numbers and its rotated key of
/// `rope_dim`, without parameters.
[[nodiscard]] constexpr int64_t latent_row_bytes(KvCode code, int64_t rank, int64_t rope_dim) {
  const KvFormat format = kv_format(code);
  const int64_t rope_bits = format.latent.parameters > 0 ? 16 : format.bits;
  return (rank * format.bits + rope_dim * rope_bits) / 8;
}

/// Sets of parameters of such a token.
[[nodiscard]] constexpr int64_t latent_sets(KvCode code, int64_t rank) {
  const LatentParameters latent = kv_format(code).latent;
  return latent.parameters == 0 ? 0
         : latent.group == 0    ? 1
                                : (rank + latent.group - 1) / latent.group;
}

/// Bytes of them.
[[nodiscard]] constexpr int64_t latent_param_bytes(KvCode code, int64_t rank) {
  const LatentParameters latent = kv_format(code).latent;
  return latent_sets(code, rank) * latent.parameters * latent.bytes;
}

/// What codes of formats with parameters per tensor are multiplied with: a layer's keys, and its
/// values. Checkpoints store them (checkpoint/kv_scales.h); 1 where they do not.
struct KvScales {
  float k = 1.0F;
  float v = 1.0F;
};

/// The cache of one layer. Layers of equal specs share pages. A value_dim of 0 says that this is a
/// residual: keys alone, kept until their group is full, for layers whose pages are elsewhere.
struct KvSpec {
  KvCode code = KvCode::kBf16;
  int64_t kv_heads = 0;
  int64_t key_dim = 0;    // of one head
  int64_t value_dim = 0;  // of one head
  bool latent = false;    // values are the first value_dim numbers of the keys: stored once
  int64_t window = 0;     // a token sees itself and the window-1 before it; 0: all

  constexpr bool operator==(const KvSpec&) const = default;
  [[nodiscard]] constexpr bool is_residual() const { return value_dim == 0; }
  /// Of a latent: numbers of its row that are its value, and those of its rotated key.
  [[nodiscard]] constexpr int64_t latent_rank() const { return latent ? value_dim : 0; }
  [[nodiscard]] constexpr int64_t rope_dim() const { return latent ? key_dim - value_dim : 0; }
};

/// Bytes of a token of a layer on a CPU, parameters included, on average.
[[nodiscard]] constexpr double kv_token_bytes(const KvSpec& layer) {
  if (layer.latent) {
    return static_cast<double>(latent_row_bytes(layer.code, layer.latent_rank(), layer.rope_dim()) +
                               latent_param_bytes(layer.code, layer.latent_rank()));
  }
  return static_cast<double>(layer.kv_heads) * kv_token_bytes(layer.code, layer.key_dim);
}

/// The residual beside a layer whose code has one: the group of the token that is computed is all
/// that is kept, which is a window of one token.
[[nodiscard]] constexpr KvSpec residual_of(const KvSpec& layer) {
  return {.code = KvCode::kBf16, .kv_heads = layer.kv_heads, .key_dim = layer.key_dim, .window = 1};
}

}  // namespace nibble
