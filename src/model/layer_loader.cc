#include "model/layer_loader.h"

#include <optional>
#include <utility>

#include "model/block_table.h"
#include "model/experts_loader.h"
#include "model/rope_frequencies.h"

namespace nibble {
namespace {

/// What runs as a GGUF file has it is called as there. F32 and F16 are read but have no row in
/// the table of schemes.
std::string_view format_name(const MappedLinear& part) {
  const TensorInfo* tensor = part.tensors.empty() ? nullptr : part.tensors.front();
  if (tensor != nullptr && tensor->blocks != nullptr && part.decoded.empty()) {
    return tensor->blocks->name;
  }
  const WeightCode code = part.weight.format.code;
  const std::string_view listed = scheme_name(part.weight.format, part.act.format);
  return !listed.empty()            ? listed
         : code == WeightCode::kF32 ? "f32"
         : code == WeightCode::kF16 ? "f16"
                                    : "unlisted";
}

/// The embedding as it lies in blocks; null where it is stored or looked up otherwise.
Result<std::unique_ptr<PreparedTable>> load_block_table(const ModelConfig& config,
                                                        WeightLoader& weights,
                                                        const Backend& backend) {
  std::unique_ptr<PreparedTable> table;
  if (backend.host_memory()) {
    NIBBLE_ASSIGN_OR_RETURN(auto source,
                            weights.block_table(module_name(*config.family, Role::kEmbedding),
                                                config.vocab_size, config.hidden_size));
    if (source != nullptr) {
      table = std::make_unique<BlockTable>(std::move(source), weights.files());
    }
  }
  return table;
}

}  // namespace

Result<Embeddings> load_embeddings(const ModelConfig& config,
                                   WeightLoader& weights,
                                   Backend& backend) {
  Embeddings loaded;
  NIBBLE_ASSIGN_OR_RETURN(loaded.tokens, load_block_table(config, weights, backend));
  if (loaded.tokens == nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const QuantView table,
                            weights.table(module_name(*config.family, Role::kEmbedding),
                                          config.vocab_size, config.hidden_size));
    NIBBLE_ASSIGN_OR_RETURN(loaded.tokens, backend.prepare_table(table, weights.files()));
  }
  if (config.learned_positions) {
    const int64_t rows = config.max_position + config.first_position;
    NIBBLE_ASSIGN_OR_RETURN(
        const QuantView view,
        weights.table(module_name(*config.family, Role::kPositions), rows, config.hidden_size));
    NIBBLE_ASSIGN_OR_RETURN(loaded.positions, backend.prepare_table(view, weights.files()));
  }
  return loaded;
}

LayerLoader::LayerLoader(const ModelConfig& config,
                         WeightLoader& weights,
                         Backend& backend,
                         int64_t max_rows)
    : config_(config), weights_(weights), backend_(backend), max_rows_(max_rows) {}

Status LayerLoader::prepare() {
  const bool latent = config_.latent.kv_rank > 0;
  const RopeFrequencies rope =
      compute_rope_frequencies(config_.rope, latent ? config_.latent.rope_dim : config_.head_dim);
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer inv_freq, backend_.upload(rope.inv_freq));
  rope_ = std::make_shared<RopeTable>(std::move(inv_freq), rope.attention_factor, rope.dynamic);
  return {};
}

Result<Norm> LayerLoader::norm(const std::string& module, int64_t size) {
  NIBBLE_ASSIGN_OR_RETURN(const auto weight, weights_.vector(module + ".weight", size));
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer copy, backend_.upload(weight));
  if (config_.norm == NormKind::kRms) {
    return Norm(std::move(copy), config_.norm_eps);
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto bias, weights_.vector(module + ".bias", size));
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer bias_copy, backend_.upload(bias));
  return Norm(std::move(copy), std::move(bias_copy), config_.norm_eps);
}

/// Projections of the same input [rows, k], stacked.
Result<Linear> LayerLoader::stacked(int64_t layer,
                                    const std::vector<Projection>& projections,
                                    int64_t k,
                                    Bias bias_mode) {
  std::vector<MappedLinear> parts;
  std::vector<float> bias;
  for (const Projection& projection : projections) {
    const std::string module = name(projection.role, layer);
    NIBBLE_ASSIGN_OR_RETURN(MappedLinear part, weights_.linear(module, projection.n, k));
    note_scheme(part);
    part.act.format = activations_of(part, config_.dtype);
    parts.push_back(std::move(part));
    if (bias_mode == Bias::kStored) {
      NIBBLE_RETURN_IF_ERROR(weights_.append_bias(module, projection.n, bias));
    }
  }
  auto linear = Linear::prepare(parts, bias, backend_, max_rows_);
  weights_.release(parts);
  return linear.ok() ? std::move(linear)
                     : linear.status().with_context(name(projections[0].role, layer));
}

Result<DecoderLayer> LayerLoader::layer(int64_t index) {
  if (config_.latent.kv_rank > 0) {
    NIBBLE_ASSIGN_OR_RETURN(LatentAttention attention, latent_attention(index));
    NIBBLE_ASSIGN_OR_RETURN(auto mlp, this->mlp(index));
    return DecoderLayer{.attention = std::move(attention), .mlp = std::move(mlp)};
  }
  NIBBLE_ASSIGN_OR_RETURN(Attention attention, this->attention(index));
  NIBBLE_ASSIGN_OR_RETURN(auto mlp, this->mlp(index));
  return DecoderLayer{.attention = std::move(attention), .mlp = std::move(mlp)};
}

Result<std::variant<Mlp, Moe>> LayerLoader::mlp(int64_t index) {
  if (has_experts(config_, index)) {
    NIBBLE_ASSIGN_OR_RETURN(Moe experts, moe(index));
    return std::variant<Mlp, Moe>(std::move(experts));
  }
  NIBBLE_ASSIGN_OR_RETURN(Mlp mlp, dense(index));
  return std::variant<Mlp, Moe>(std::move(mlp));
}

Result<Attention> LayerLoader::attention(int64_t layer) {
  const int64_t q_width = config_.num_heads * config_.head_dim;
  const int64_t kv_width = config_.num_kv_heads * config_.head_dim;
  NIBBLE_ASSIGN_OR_RETURN(Norm norm,
                          this->norm(name(Role::kAttentionNorm, layer), config_.hidden_size));
  NIBBLE_ASSIGN_OR_RETURN(
      Linear qkv,
      stacked(layer, {{Role::kQuery, q_width}, {Role::kKey, kv_width}, {Role::kValue, kv_width}},
              config_.hidden_size, config_.qkv_bias ? Bias::kStored : Bias::kNone));
  NIBBLE_ASSIGN_OR_RETURN(Linear output,
                          stacked(layer, {{Role::kAttentionOutput, config_.hidden_size}}, q_width,
                                  config_.output_bias ? Bias::kStored : Bias::kNone));
  std::optional<Norm> q_norm;
  std::optional<Norm> k_norm;
  if (config_.qk_norm) {
    NIBBLE_ASSIGN_OR_RETURN(q_norm, this->norm(name(Role::kQueryNorm, layer), config_.head_dim));
    NIBBLE_ASSIGN_OR_RETURN(k_norm, this->norm(name(Role::kKeyNorm, layer), config_.head_dim));
  }
  DeviceBuffer sinks;
  if (config_.sinks) {
    NIBBLE_ASSIGN_OR_RETURN(const auto stored,
                            weights_.vector(name(Role::kSinks, layer), config_.num_heads));
    NIBBLE_ASSIGN_OR_RETURN(sinks, backend_.upload(stored));
  }
  NIBBLE_ASSIGN_OR_RETURN(auto basis, this->basis(layer));
  NIBBLE_ASSIGN_OR_RETURN(const auto kv_scales, weights_.kv_scales(layer));
  layers_with_kv_scales_ += kv_scales ? 1 : 0;
  const AttentionShape shape{.heads = config_.num_heads,
                             .kv_heads = config_.num_kv_heads,
                             .head_dim = config_.head_dim,
                             .sliding_window = config_.sliding_windows[static_cast<size_t>(layer)],
                             .kv_scales = kv_scales.value_or(KvScales{})};
  return Attention(Attention::Parts{.norm = std::move(norm),
                                    .qkv = std::move(qkv),
                                    .output = std::move(output),
                                    .q_norm = std::move(q_norm),
                                    .k_norm = std::move(k_norm),
                                    .sinks = std::move(sinks),
                                    .basis = std::move(basis)},
                   shape, rope_);
}

/// What the sidecar says of a layer, if there is one.
Result<std::optional<AttentionBasis>> LayerLoader::basis(int64_t layer) {
  if (!sidecar_) {
    return std::optional<AttentionBasis>();
  }
  const KvSidecar::Layer& stored = sidecar_->layers[static_cast<size_t>(layer)];
  if (kv_format(sidecar_code_).per == KvParameters::kPerChannel) {
    NIBBLE_ASSIGN_OR_RETURN(AttentionBasis basis, static_basis(stored));
    return std::optional(std::move(basis));
  }
  const HeadForm keys = kv_has_residual(sidecar_code_)
                            ? stored.keys.page_form.value_or(HeadForm{.turned = true})
                            : stored.keys.form;
  AttentionBasis out{.keys = keys, .values = stored.values.form};
  if (out.keys.centred) {
    NIBBLE_ASSIGN_OR_RETURN(out.key_mean, backend_.upload(stored.keys.mean));
  }
  if (out.values.centred) {
    NIBBLE_ASSIGN_OR_RETURN(out.value_mean, backend_.upload(stored.values.mean));
  }
  return std::optional(std::move(out));
}

/// Of formats with ranges.
Result<AttentionBasis> LayerLoader::static_basis(const KvSidecar::Layer& stored) {
  const KvSidecar::Ranges& keys = stored.keys.ranges.value();
  const KvSidecar::Ranges& values = stored.values.ranges.value();
  AttentionBasis out{.keys = {.centred = !keys.mean.empty(), .turned = keys.turned},
                     .values = {.centred = !values.mean.empty(), .turned = values.turned}};
  for (const auto& [numbers, buffer] :
       {std::pair(&keys.mean, &out.key_mean), std::pair(&values.mean, &out.value_mean),
        std::pair(&keys.step, &out.key_step), std::pair(&values.step, &out.value_step)}) {
    if (!numbers->empty()) {
      NIBBLE_ASSIGN_OR_RETURN(*buffer, backend_.upload(*numbers));
    }
  }
  return out;
}

/// What the file says of the inputs of a matrix of k columns, if the backend computes it.
Result<int64_t> LayerLoader::turn(Role role, int64_t layer, int64_t k) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t turn, weights_.turn_of(name(role, layer), k));
  NIBBLE_RETURN_IF_ERROR(backend_.check_turn(turn, k).with_context(name(role, layer)));
  return turn;
}

Result<Mlp> LayerLoader::dense(int64_t layer) {
  const Bias bias = config_.mlp_bias ? Bias::kStored : Bias::kNone;
  const int64_t width = config_.intermediate_size;
  NIBBLE_ASSIGN_OR_RETURN(Norm norm, this->norm(name(Role::kMlpNorm, layer), config_.hidden_size));
  std::vector<Projection> projections = {{Role::kUp, width}};
  if (has_gate(config_.activation)) {
    projections.insert(projections.begin(), {Role::kGate, width});
  }
  NIBBLE_ASSIGN_OR_RETURN(Linear up, stacked(layer, projections, config_.hidden_size, bias));
  NIBBLE_ASSIGN_OR_RETURN(Linear down,
                          stacked(layer, {{Role::kDown, config_.hidden_size}}, width, bias));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t turn, this->turn(Role::kDown, layer, width));
  return Mlp({.norm = std::move(norm),
              .up = std::move(up),
              .down = std::move(down),
              .activation = config_.activation,
              .turn = turn});
}

Result<Moe> LayerLoader::moe(int64_t layer) {
  NIBBLE_ASSIGN_OR_RETURN(Norm norm, this->norm(name(Role::kMlpNorm, layer), config_.hidden_size));
  NIBBLE_ASSIGN_OR_RETURN(
      auto experts, load_experts({.config = config_,
                                  .weights = weights_,
                                  .backend = backend_,
                                  .max_rows = max_rows_,
                                  .share = share_,
                                  .note = [this](const MappedLinear& part) { note_scheme(part); }},
                                 layer));
  NIBBLE_ASSIGN_OR_RETURN(auto shared, shared_expert(layer));
  return Moe({.norm = std::move(norm), .experts = std::move(experts), .shared = std::move(shared)},
             config_);
}

Result<std::unique_ptr<Moe::Shared>> LayerLoader::shared_expert(int64_t layer) {
  const MoeConfig& moe = config_.moe;
  const int64_t hidden = config_.hidden_size;
  if (moe.shared_width == 0) {
    return std::unique_ptr<Moe::Shared>();
  }
  NIBBLE_ASSIGN_OR_RETURN(
      Linear gate_up,
      stacked(layer, {{Role::kSharedGate, moe.shared_width}, {Role::kSharedUp, moe.shared_width}},
              hidden, Bias::kNone));
  NIBBLE_ASSIGN_OR_RETURN(
      Linear down, stacked(layer, {{Role::kSharedDown, hidden}}, moe.shared_width, Bias::kNone));
  NIBBLE_RETURN_IF_ERROR(gate_up.prepare_branch());
  NIBBLE_RETURN_IF_ERROR(down.prepare_branch());
  NIBBLE_ASSIGN_OR_RETURN(const int64_t turn,
                          this->turn(Role::kSharedDown, layer, moe.shared_width));
  DeviceBuffer gate;
  if (moe.shared_gate) {
    NIBBLE_ASSIGN_OR_RETURN(
        const auto stored,
        weights_.numbers(name(Role::kSharedExpertGate, layer) + ".weight", {1, hidden}));
    NIBBLE_ASSIGN_OR_RETURN(gate, backend_.upload(stored));
  }
  return std::make_unique<Moe::Shared>(Moe::Shared{.gate_up = std::move(gate_up),
                                                   .down = std::move(down),
                                                   .gate = std::move(gate),
                                                   .turn = turn});
}

void LayerLoader::note_scheme(const MappedLinear& part) {
  const std::string_view name = format_name(part);
  if (scheme_.empty()) {
    scheme_ = name;
  } else if (scheme_ != name) {
    scheme_ = "mixed";
  }
}

}  // namespace nibble
