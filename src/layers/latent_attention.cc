#include "layers/latent_attention.h"

#include <cmath>
#include <utility>

#include "base/check.h"

namespace nibble {

LatentAttention::LatentAttention(Parts parts,
                                 const ModelConfig& config,
                                 std::shared_ptr<const RopeTable> rope)
    : parts_(std::move(parts)),
      form_(config.latent),
      heads_(config.num_heads),
      rope_(std::move(rope)) {
  CHECK_EQ(parts_.down.n(), first_width() + form_.row_dim());
  CHECK_EQ(parts_.output.k(), heads_ * form_.value_dim);
  CHECK(parts_.q_norm.has_value() == parts_.q_up.has_value());
}

int64_t LatentAttention::first_width() const {
  return form_.q_rank > 0 ? form_.q_rank : heads_ * form_.query_dim();
}

LatentRope LatentAttention::rope() const {
  return {.inv_freq = rope_->inv_freq.as<float>(),
          .dim = form_.rope_dim,
          .attention_factor = rope_->attention_factor,
          .interleaved = form_.interleaved};
}

int64_t LatentAttention::weight_bytes() const {
  return parts_.down.weight_bytes() + (parts_.q_up ? parts_.q_up->weight_bytes() : 0) +
         parts_.keys->weight_bytes() + parts_.values->weight_bytes() + parts_.output.weight_bytes();
}

std::array<ScratchNeed, 5> LatentAttention::scratch(const ModelConfig& config) {
  const LatentConfig& form = config.latent;
  const int64_t queries = config.num_heads * form.query_dim();
  const int64_t rows = config.num_heads * form.row_dim();
  return {{{ScratchName::kQkv, (form.q_rank > 0 ? form.q_rank : queries) + form.row_dim()},
           {ScratchName::kQueries, form.q_rank > 0 ? queries : 0},
           {ScratchName::kAbsorbed, rows},
           {ScratchName::kUp, rows},  // what comes out of attention over rows
           {ScratchName::kAttended, config.num_heads * form.value_dim}}};
}

void LatentAttention::forward(float* hidden, const ForwardContext& context) {
  absorb(project(hidden, context), context);
  attend(context);
  add_output(hidden, context);
}

/// Appends to the cache on the way.
LatentAttention::Queries LatentAttention::project(const float* hidden,
                                                  const ForwardContext& context) {
  const Activations rows = context.scratch[ScratchName::kQkv];
  const int64_t stride = parts_.down.n();
  parts_.down.forward({.x = hidden, .m = context.rows, .y = rows, .input = parts_.norm.input()},
                      context);
  context.step.append_latent({.rows = rows,
                              .stride = stride,
                              .q_rank = first_width(),
                              .q_norm = parts_.q_norm ? parts_.q_norm->weight() : nullptr,
                              .latent_norm = parts_.latent_norm.weight(),
                              .norm_eps = parts_.latent_norm.eps(),
                              .rope = rope(),
                              .kv = context.kv,
                              .sequences = context.sequences});
  if (!parts_.q_up) {
    return {rows, stride};
  }
  const Activations queries = context.scratch[ScratchName::kQueries];
  parts_.q_up->forward({.x = rows, .x_stride = stride, .m = context.rows, .y = queries}, context);
  return {queries, parts_.q_up->n()};
}

/// Queries as rows of the cache meet them, [rows, heads, row_dim].
void LatentAttention::absorb(const Queries& queries, const ForwardContext& context) {
  const Activations absorbed = context.scratch[ScratchName::kAbsorbed];
  parts_.keys->run({.x = queries.at,
                    .x_stride = queries.stride,
                    .x_head = form_.query_dim(),
                    .m = context.rows,
                    .y = absorbed,
                    .y_stride = heads_ * form_.row_dim(),
                    .y_head = form_.row_dim()});
  context.step.rotate_latent_queries({.q = queries.at,
                                      .q_stride = queries.stride,
                                      .heads = heads_,
                                      .head_dim = form_.query_dim(),
                                      .rope = rope(),
                                      .out = absorbed,
                                      .out_dim = form_.row_dim(),
                                      .sequences = context.sequences});
}

void LatentAttention::attend(const ForwardContext& context) {
  const Activations attended = context.scratch[ScratchName::kUp];
  const int64_t stride = heads_ * form_.row_dim();
  const double scale = form_.score_factor / std::sqrt(static_cast<double>(form_.query_dim()));
  context.step.attention({.q = context.scratch[ScratchName::kAbsorbed],
                          .q_stride = stride,
                          .out = attended,
                          .out_stride = stride,
                          .heads = heads_,
                          .scale = static_cast<float>(scale),
                          .kv = context.kv,
                          .sequences = context.sequences});
  parts_.values->run({.x = attended,
                      .x_stride = stride,
                      .x_head = form_.row_dim(),
                      .m = context.rows,
                      .y = context.scratch[ScratchName::kAttended],
                      .y_stride = heads_ * form_.value_dim,
                      .y_head = form_.value_dim});
}

void LatentAttention::add_output(float* hidden, const ForwardContext& context) {
  parts_.output.forward({.x = context.scratch[ScratchName::kAttended],
                         .m = context.rows,
                         .y = hidden,
                         .output = GemmOutput::kAdd},
                        context);
}

}  // namespace nibble
