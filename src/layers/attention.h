#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "arch/config.h"
#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/norm.h"

namespace nibble {

/// Rotation frequencies of one model, shared by its layers.
struct RopeTable {
  DeviceBuffer inv_freq;  // [head_dim / 2] f32, radians per position
  float attention_factor = 1.0F;
  DynamicRope dynamic;

  RopeTable(DeviceBuffer frequencies, float factor, const DynamicRope& scaling)
      : inv_freq(std::move(frequencies)), attention_factor(factor), dynamic(scaling) {}
};

/// How a layer enters caches whose format has HeadForm (KvFormat::turned).
struct AttentionBasis {
  HeadForm keys;
  HeadForm values;
  DeviceBuffer key_mean;    // [kv_heads, head_dim] f32; empty unless keys are centred
  DeviceBuffer value_mean;  // the same of values
  DeviceBuffer key_step;    // [kv_heads, head_dim] f32 of formats with parameters per channel
  DeviceBuffer value_step;

  [[nodiscard]] KvBasis view() const;
};

struct AttentionShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t sliding_window = 0;  // 0: full attention
  KvScales kv_scales;          // of caches with parameters per tensor; other forms need none
};

/// hidden += output(attention(rope(qkv(norm(hidden))))), with keys and values in the paged cache.
class Attention final {
 public:
  struct Parts {
    Norm norm;
    Linear qkv;                  // [(heads + 2 kv_heads) * head_dim, hidden]
    Linear output;               // [hidden, heads * head_dim]
    std::optional<Norm> q_norm;  // RMSNorm over head_dim, before the rotation; both or neither
    std::optional<Norm> k_norm;
    DeviceBuffer sinks;                   // [heads] f32: logits without values; empty: none
    std::optional<AttentionBasis> basis;  // none: what the cache's view says
  };

  Attention(Parts parts, const AttentionShape& shape, std::shared_ptr<const RopeTable> rope);

  [[nodiscard]] int64_t weight_bytes() const {
    return parts_.qkv.weight_bytes() + parts_.output.weight_bytes();
  }

  [[nodiscard]] static std::array<ScratchNeed, 2> scratch(const ModelConfig& config);

  /// hidden [rows, hidden]. Appends the rows' keys and values to context.kv.
  void forward(float* hidden, const ForwardContext& context);

  /// The parts of forward(), in their order, for those who look between them: queries, keys and
  /// values into the scratch kQkv; their attention into kAttended; that onto hidden.
  void project(const float* hidden, const ForwardContext& context);
  void attend(const ForwardContext& context);
  void add_output(float* hidden, const ForwardContext& context);

 private:
  Parts parts_;
  AttentionShape shape_;
  std::shared_ptr<const RopeTable> rope_;
};

}  // namespace nibble
