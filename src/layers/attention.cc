#include "layers/attention.h"

#include <cmath>
#include <utility>

#include "base/check.h"

namespace nibble {

KvBasis AttentionBasis::view() const {
  return {.turns_keys = keys.turned,
          .turns_values = values.turned,
          .key_mean = keys.centred ? key_mean.as<float>() : nullptr,
          .value_mean = values.centred ? value_mean.as<float>() : nullptr,
          .key_step = key_step.size() > 0 ? key_step.as<float>() : nullptr,
          .value_step = value_step.size() > 0 ? value_step.as<float>() : nullptr};
}

Attention::Attention(Parts parts,
                     const AttentionShape& shape,
                     std::shared_ptr<const RopeTable> rope)
    : parts_(std::move(parts)), shape_(shape), rope_(std::move(rope)) {
  CHECK_EQ(parts_.qkv.n(), (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim);
  CHECK_EQ(parts_.output.k(), shape_.heads * shape_.head_dim);
  CHECK_EQ(static_cast<int64_t>(rope_->inv_freq.size() / sizeof(float)) * 2, shape_.head_dim);
  CHECK(parts_.q_norm.has_value() == parts_.k_norm.has_value());
}

std::array<ScratchNeed, 2> Attention::scratch(const ModelConfig& config) {
  const int64_t heads = config.num_heads + 2 * config.num_kv_heads;
  return {{{ScratchName::kQkv, heads * config.head_dim},
           {ScratchName::kAttended, config.num_heads * config.head_dim}}};
}

void Attention::forward(float* hidden, const ForwardContext& context) {
  project(hidden, context);
  attend(context);
  add_output(hidden, context);
}

void Attention::project(const float* hidden, const ForwardContext& context) {
  parts_.qkv.forward({.x = hidden,
                      .m = context.rows,
                      .y = context.scratch[ScratchName::kQkv],
                      .input = parts_.norm.input()},
                     context);
}

void Attention::add_output(float* hidden, const ForwardContext& context) {
  parts_.output.forward({.x = context.scratch[ScratchName::kAttended],
                         .m = context.rows,
                         .y = hidden,
                         .output = GemmOutput::kAdd},
                        context);
}

void Attention::attend(const ForwardContext& context) {
  Step& step = context.step;
  const Activations qkv = context.scratch[ScratchName::kQkv];
  const Activations attended = context.scratch[ScratchName::kAttended];
  const int64_t stride = parts_.qkv.n();
  KvView kv = context.kv;
  if (kv_format(kv.code).per == KvParameters::kPerTensor) {
    kv.scales = shape_.kv_scales;
  }
  if (kv_format(kv.code).turned && parts_.basis) {
    kv.basis = parts_.basis->view();
  }
  // Where integers follow, all else is exact: attention alone could tell a GPU from a CPU.
  const bool shared = is_integer(parts_.output.act()) && kv.code == KvCode::kBf16;
  const AttentionForm form = shared ? AttentionForm::kShared : AttentionForm::kOwn;
  step.rope_append_kv(RopeAppendArgs{.qkv = qkv,
                                     .stride = stride,
                                     .heads = shape_.heads,
                                     .inv_freq = rope_->inv_freq.as<float>(),
                                     .attention_factor = rope_->attention_factor,
                                     .kv = kv,
                                     .sequences = context.sequences,
                                     .q_norm = parts_.q_norm ? parts_.q_norm->weight() : nullptr,
                                     .k_norm = parts_.k_norm ? parts_.k_norm->weight() : nullptr,
                                     .norm_eps = parts_.q_norm ? parts_.q_norm->eps() : 0.0F,
                                     .form = form,
                                     .dynamic = rope_->dynamic,
                                     .residuals = context.residuals});
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  step.attention(
      AttentionArgs{.q = qkv,
                    .q_stride = stride,
                    .out = attended,
                    .out_stride = shape_.heads * shape_.head_dim,
                    .heads = shape_.heads,
                    .scale = scale,
                    .sliding_window = shape_.sliding_window,
                    .kv = kv,
                    .sequences = context.sequences,
                    .form = form,
                    .sinks = parts_.sinks.size() > 0 ? parts_.sinks.as<float>() : nullptr,
                    .residuals = context.residuals});
}

}  // namespace nibble
