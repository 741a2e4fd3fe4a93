#include <cstring>
#include <optional>
#include <utility>

#include "base/f16.h"
#include "model/layer_loader.h"
#include "quant/codec.h"

namespace nibble {
namespace {

/// Weights [n, k] in F32, or rounded to BF16 where the model is.
Result<QuantTensor> plain_matrix(const std::vector<float>& values, int64_t n, DType model) {
  const auto k = static_cast<int64_t>(values.size()) / n;
  const bool bf16 = model == DType::kBF16;
  NIBBLE_ASSIGN_OR_RETURN(
      QuantTensor out,
      QuantTensor::allocate({.code = bf16 ? WeightCode::kBf16 : WeightCode::kF32}, n, k));
  if (bf16) {
    std::ranges::transform(values, out.codes.as<uint16_t>().begin(), f32_to_bf16);
  } else {
    std::memcpy(out.codes.data(), values.data(), values.size() * sizeof(float));
  }
  return out;
}

}  // namespace

/// The matrix that makes keys and values of the cached rows, in two for each head: absorbed
/// attention multiplies queries by the first, transposed, and results by the second. Whatever the
/// file stores is decoded.
Result<LayerLoader::LatentHeads> LayerLoader::latent_heads(int64_t layer) {
  const LatentConfig& form = config_.latent;
  const std::string module = name(Role::kLatentUp, layer);
  const int64_t of_head = form.nope_dim + form.value_dim;
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear mapped,
                          weights_.linear(module, config_.num_heads * of_head, form.kv_rank));
  if (mapped.act.columns != nullptr) {
    return make_error(StatusCode::kUnsupported,
                      "{}: its columns lie in the order of GPTQ's act-order, which this build does "
                      "not put back here; quantize without act-order",
                      module);
  }
  note_scheme(mapped);
  NIBBLE_ASSIGN_OR_RETURN(const QuantTensor stored, copy_of(mapped.weight));
  std::vector<QuantTensor> keys;
  std::vector<QuantTensor> values;
  std::vector<float> row(static_cast<size_t>(form.kv_rank));
  for (int64_t head = 0; head < config_.num_heads; ++head) {
    std::vector<float> key(static_cast<size_t>(form.kv_rank * form.nope_dim));
    std::vector<float> value(static_cast<size_t>(form.value_dim * form.kv_rank));
    for (int64_t i = 0; i < of_head; ++i) {
      decode_row(stored, head * of_head + i, row.data());
      for (int64_t j = 0; j < form.kv_rank; ++j) {
        float& to = i < form.nope_dim
                        ? key[static_cast<size_t>(j * form.nope_dim + i)]
                        : value[static_cast<size_t>((i - form.nope_dim) * form.kv_rank + j)];
        to = row[static_cast<size_t>(j)];
      }
    }
    NIBBLE_ASSIGN_OR_RETURN(keys.emplace_back(), plain_matrix(key, form.kv_rank, config_.dtype));
    NIBBLE_ASSIGN_OR_RETURN(values.emplace_back(),
                            plain_matrix(value, form.value_dim, config_.dtype));
  }
  weights_.release({&mapped, 1});
  const ActFormat act = config_.dtype == DType::kBF16 ? ActFormat::kBf16 : ActFormat::kFloat;
  const auto prepare = [&](const std::vector<QuantTensor>& heads) {
    std::vector<QuantView> views;
    for (const QuantTensor& head : heads) {
      views.push_back(view_of(head));
      views.back().name = module;
    }
    return backend_.prepare_heads(views, act, max_rows_);
  };
  LatentHeads heads;
  NIBBLE_ASSIGN_OR_RETURN(heads.keys, prepare(keys));
  NIBBLE_ASSIGN_OR_RETURN(heads.values, prepare(values));
  return heads;
}

Result<LatentAttention> LayerLoader::latent_attention(int64_t layer) {
  const LatentConfig& form = config_.latent;
  const int64_t hidden = config_.hidden_size;
  const int64_t queries = config_.num_heads * form.query_dim();
  const bool staged = form.q_rank > 0;
  NIBBLE_ASSIGN_OR_RETURN(Norm norm, this->norm(name(Role::kAttentionNorm, layer), hidden));
  const Projection first =
      staged ? Projection{Role::kQueryDown, form.q_rank} : Projection{Role::kQuery, queries};
  NIBBLE_ASSIGN_OR_RETURN(Linear down, stacked(layer, {first, {Role::kLatentDown, form.row_dim()}},
                                               hidden, Bias::kNone));
  std::optional<Norm> q_norm;
  std::optional<Linear> q_up;
  if (staged) {
    NIBBLE_ASSIGN_OR_RETURN(q_norm, this->norm(name(Role::kQueryDownNorm, layer), form.q_rank));
    NIBBLE_ASSIGN_OR_RETURN(q_up,
                            stacked(layer, {{Role::kQueryUp, queries}}, form.q_rank, Bias::kNone));
  }
  NIBBLE_ASSIGN_OR_RETURN(Norm latent_norm,
                          this->norm(name(Role::kLatentNorm, layer), form.kv_rank));
  NIBBLE_ASSIGN_OR_RETURN(LatentHeads heads, latent_heads(layer));
  NIBBLE_ASSIGN_OR_RETURN(Linear output, stacked(layer, {{Role::kAttentionOutput, hidden}},
                                                 config_.num_heads * form.value_dim, Bias::kNone));
  return LatentAttention({.norm = std::move(norm),
                          .down = std::move(down),
                          .q_norm = std::move(q_norm),
                          .q_up = std::move(q_up),
                          .latent_norm = std::move(latent_norm),
                          .keys = std::move(heads.keys),
                          .values = std::move(heads.values),
                          .output = std::move(output)},
                         config_, rope_);
}

}  // namespace nibble
