#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace nibble {

/// How cached keys and values are coded; kv_format() says what each code means.
enum class KvCode : uint8_t { kF32, kBf16, kInt8, kInt4, kFp8 };

/// All codes, in the order that messages and tables list them.
inline constexpr std::array kKvCodes = {KvCode::kF32, KvCode::kBf16, KvCode::kFp8, KvCode::kInt8,
                                        KvCode::kInt4};

/// What one set of parameters of a cache belongs to: nothing, a token of one head, a channel of one
/// head over the tokens of a page, or all tokens of a layer.
enum class KvParameters : uint8_t { kNone, kPerTokenHead, kPerChannelPage, kPerTensor };

/// How the elements of a row lie in its bytes: one after the other, or two in a byte, the first in
/// the low nibble.
enum class KvOrder : uint8_t { kWhole, kLowNibbleFirst };

/// One row of the table of cache formats. Memory layouts, flags, messages, reports and plans ask
/// it. Parameters are f32 on CPUs and fp16 on GPUs.
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
};

/// int8: scale = absmax / 127, value = code * scale. int4: value = code * scale + offset, codes
/// 0..15; the CPU clips the range min..max around its middle to 1, 0.92 and 0.84 of it, takes the
/// int4 codes of each, a least-squares line through these, that line's nearest codes and so on,
/// three times, and stores the best line's nearest codes with the line through them. fp8: e4m3,
/// value = code * scale, where KvScales has the scale; values past 448 times the scale are clipped.
[[nodiscard]] constexpr KvFormat kv_format(KvCode code) {
  switch (code) {
    case KvCode::kF32:
      return {.name = "f32", .bits = 32};
    case KvCode::kBf16:
      return {.name = "bf16", .bits = 16};
    case KvCode::kInt8:
      return {.name = "int8",
              .bits = 8,
              .per = KvParameters::kPerTokenHead,
              .parameters = 1,
              .tolerance = 0.03};  // step 2 / 127
    case KvCode::kInt4:
      return {.name = "int4",
              .bits = 4,
              .per = KvParameters::kPerTokenHead,
              .parameters = 2,
              .order = KvOrder::kLowNibbleFirst,
              .turned = true,
              .tolerance = 0.3};  // step 4 / 15
    case KvCode::kFp8:
      return {.name = "fp8",
              .bits = 8,
              .per = KvParameters::kPerTensor,
              .parameters = 1,
              .tolerance = 0.12};  // three bits of mantissa
  }
  return {};
}

/// What flags, metrics, reports and messages call a cache's format.
[[nodiscard]] constexpr std::string_view kv_code_name(KvCode code) { return kv_format(code).name; }

/// Their names: "f32, bf16, fp8, int8, int4".
[[nodiscard]] std::string kv_code_names(std::span<const KvCode> codes = kKvCodes);

/// Bytes of one head's codes for one token.
[[nodiscard]] constexpr int64_t kv_row_bytes(KvCode code, int64_t head_dim) {
  return head_dim * kv_format(code).bits / 8;
}

/// Parameters of one head for one token, of K or of V.
[[nodiscard]] constexpr int64_t kv_row_params(KvCode code) {
  const KvFormat format = kv_format(code);
  return format.per == KvParameters::kPerTokenHead ? format.parameters : 0;
}

/// Bytes of one head's keys or values for one token on a CPU, parameters included.
[[nodiscard]] constexpr int64_t kv_token_bytes(KvCode code, int64_t head_dim) {
  return kv_row_bytes(code, head_dim) + 4 * kv_row_params(code);
}

/// What is done to the heads of keys, or of values, before they are coded.
struct HeadForm {
  bool centred = false;  // each channel's mean is taken off
  bool turned = false;   // then hadamard() turns it

  constexpr bool operator==(const HeadForm&) const = default;
};

/// All of them: by index, bit 0 is `centred` and bit 1 is `turned`.
inline constexpr std::array kHeadForms = {HeadForm{}, HeadForm{.centred = true},
                                          HeadForm{.turned = true},
                                          HeadForm{.centred = true, .turned = true}};

[[nodiscard]] constexpr size_t head_form_index(HeadForm form) {
  return (form.centred ? 1U : 0U) + (form.turned ? 2U : 0U);
}

/// "plain", "centred", "turned", "centred+turned".
[[nodiscard]] std::string_view head_form_name(HeadForm form);
/// The form of this name, or none.
[[nodiscard]] std::optional<HeadForm> find_head_form(std::string_view name);

/// What codes of formats with parameters per tensor are multiplied with: a layer's keys, and its
/// values. Checkpoints store them (checkpoint/kv_scales.h); 1 where they do not.
struct KvScales {
  float k = 1.0F;
  float v = 1.0F;
};

/// The cache of one layer. Layers of equal specs share pages.
struct KvSpec {
  KvCode code = KvCode::kBf16;
  int64_t kv_heads = 0;
  int64_t key_dim = 0;    // of one head
  int64_t value_dim = 0;  // of one head
  bool latent = false;    // values are the first value_dim numbers of the keys: stored once
  int64_t window = 0;     // a token sees itself and the window-1 before it; 0: all

  constexpr bool operator==(const KvSpec&) const = default;
};

}  // namespace nibble
