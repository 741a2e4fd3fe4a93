#include "layers/latent_attention.h"

#include <cmath>
#include <utility>
#include <vector>

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

float LatentAttention::scale() const {
  const double scale = form_.score_factor / std::sqrt(static_cast<double>(form_.query_dim()));
  return static_cast<float>(scale);
}

void LatentAttention::forward(float* hidden, const ForwardContext& context) {
  const Queries queries = project(hidden, context);
  const ExpandedLatentArgs expanded = this->expanded(queries, context);
  const std::vector<RowRange> absorbed = context.step.absorbed_rows(expanded);
  absorb(queries, absorbed, context);
  attend(absorbed, context);
  context.step.attend_expanded(expanded);
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

ExpandedLatentArgs LatentAttention::expanded(const Queries& queries,
                                             const ForwardContext& context) const {
  return {.heads = heads_,
          .nope_dim = form_.nope_dim,
          .value_dim = form_.value_dim,
          .scale = scale(),
          .q = queries.at,
          .q_stride = queries.stride,
          .rotated = context.scratch[ScratchName::kAbsorbed],
          .unfinished = context.scratch[ScratchName::kUp],
          .out = context.scratch[ScratchName::kAttended],
          .keys = parts_.keys.get(),
          .values = parts_.values.get(),
          .kv = context.kv};
}

/// Queries as rows of the cache meet them, [rows, heads, row_dim]: of all rows what is rotated, of
/// the absorbed ones the rest as well.
void LatentAttention::absorb(const Queries& queries,
                             std::span<const RowRange> absorbed,
                             const ForwardContext& context) {
  const Activations rows = context.scratch[ScratchName::kAbsorbed];
  const int64_t stride = heads_ * form_.row_dim();
  for (const RowRange& range : absorbed) {
    parts_.keys->run({.x = queries.at.at(range.first * queries.stride),
                      .x_stride = queries.stride,
                      .x_head = form_.query_dim(),
                      .m = range.count,
                      .y = rows.at(range.first * stride),
                      .y_stride = stride,
                      .y_head = form_.row_dim()});
  }
  context.step.rotate_latent_queries({.q = queries.at,
                                      .q_stride = queries.stride,
                                      .heads = heads_,
                                      .head_dim = form_.query_dim(),
                                      .rope = rope(),
                                      .out = rows,
                                      .out_dim = form_.row_dim(),
                                      .sequences = context.sequences});
}

void LatentAttention::attend(std::span<const RowRange> absorbed, const ForwardContext& context) {
  if (absorbed.empty()) {
    return;
  }
  const Activations attended = context.scratch[ScratchName::kUp];
  const int64_t stride = heads_ * form_.row_dim();
  context.step.attention({.q = context.scratch[ScratchName::kAbsorbed],
                          .q_stride = stride,
                          .out = attended,
                          .out_stride = stride,
                          .heads = heads_,
                          .scale = scale(),
                          .kv = context.kv,
                          .sequences = context.sequences});
  const int64_t width = heads_ * form_.value_dim;
  for (const RowRange& range : absorbed) {
    parts_.values->run({.x = attended.at(range.first * stride),
                        .x_stride = stride,
                        .x_head = form_.row_dim(),
                        .m = range.count,
                        .y = context.scratch[ScratchName::kAttended].at(range.first * width),
                        .y_stride = width,
                        .y_head = form_.value_dim});
  }
}

void LatentAttention::add_output(float* hidden, const ForwardContext& context) {
  parts_.output.forward({.x = context.scratch[ScratchName::kAttended],
                         .m = context.rows,
                         .y = hidden,
                         .output = GemmOutput::kAdd},
                        context);
}

}  // namespace nibble
