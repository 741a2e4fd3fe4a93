#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arch/family.h"
#include "base/log.h"
#include "model/block_table.h"
#include "model/blocks.h"
#include "model/decoder.h"
#include "model/experts_loader.h"
#include "model/rope_frequencies.h"
#include "model/weight_loader.h"

namespace nibble {

namespace {

constexpr int64_t kLayersAhead = 4;  // layers whose weights the disk reads while one is packed

/// Builds the layers of one model, one after the other, and notes which formats occur.
class DecoderLoader final {
 public:
  DecoderLoader(const ModelConfig& config,
                WeightLoader& weights,
                Backend& backend,
                const ModelOptions& options)
      : config_(config), weights_(weights), backend_(backend), options_(options) {}

  Result<DecoderParts> load() {
    const RopeFrequencies rope = compute_rope_frequencies(config_.rope, config_.head_dim);
    NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer inv_freq, backend_.upload(rope.inv_freq));
    rope_ = std::make_shared<RopeTable>(std::move(inv_freq), rope.attention_factor, rope.dynamic);
    NIBBLE_ASSIGN_OR_RETURN(auto embedding, load_block_table());
    QuantView table;
    if (embedding == nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(
          table, weights_.table(name(Role::kEmbedding), config_.vocab_size, config_.hidden_size));
    }
    // The head, the largest matrix, comes first: its file pages are gone before the layers are
    // there.
    NIBBLE_ASSIGN_OR_RETURN(const std::string head_module, weights_.head_module());
    weights_.read_ahead(head_module);
    for (int64_t index = 0; index < kLayersAhead; ++index) {
      weights_.read_ahead(layer_prefix(*config_.family, index));
    }
    NIBBLE_ASSIGN_OR_RETURN(Linear head, load_head(head_module));
    std::vector<DecoderLayer> layers;
    for (int64_t index = 0; index < config_.num_layers; ++index) {
      // Packing is faster than disks: what comes next is read meanwhile.
      weights_.read_ahead(layer_prefix(*config_.family, index + kLayersAhead));
      NIBBLE_ASSIGN_OR_RETURN(DecoderLayer layer, load_layer(index));
      layers.push_back(std::move(layer));
    }
    NIBBLE_ASSIGN_OR_RETURN(Norm norm, load_norm(name(Role::kFinalNorm), config_.hidden_size));
    if (embedding == nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(embedding, backend_.prepare_table(table, weights_.files()));
    }
    std::unique_ptr<PreparedTable> positions;
    if (config_.learned_positions) {
      const int64_t rows = config_.max_position + config_.first_position;
      NIBBLE_ASSIGN_OR_RETURN(const QuantView view,
                              weights_.table(name(Role::kPositions), rows, config_.hidden_size));
      NIBBLE_ASSIGN_OR_RETURN(positions, backend_.prepare_table(view, weights_.files()));
    }
    weights_.release_all();
    log_kv_scales();
    return DecoderParts{.config = config_,
                        .scheme = scheme_,
                        .folder = {},
                        .embedding = std::move(embedding),
                        .positions = std::move(positions),
                        .layers = std::move(layers),
                        .final_norm = std::move(norm),
                        .head = std::move(head)};
  }

 private:
  enum class Bias { kNone, kStored };
  struct Projection {
    Role role;
    int64_t n;
  };

  [[nodiscard]] std::string name(Role role, int64_t layer = 0) const {
    return module_name(*config_.family, role, layer);
  }

  void log_kv_scales() const {
    if (layers_with_kv_scales_ > 0) {
      NIBBLE_LOG(kInfo,
                 "{} of {} layers have scales for keys and values in FP8 (k_scale, v_scale): "
                 "--kv-cache-dtype fp8 uses them, other caches need none",
                 layers_with_kv_scales_, config_.num_layers);
    }
  }

  /// The embedding as it lies in blocks; null where it is stored or looked up otherwise.
  Result<std::unique_ptr<PreparedTable>> load_block_table() {
    std::unique_ptr<PreparedTable> table;
    if (backend_.host_memory()) {
      NIBBLE_ASSIGN_OR_RETURN(
          auto source,
          weights_.block_table(name(Role::kEmbedding), config_.vocab_size, config_.hidden_size));
      if (source != nullptr) {
        table = std::make_unique<BlockTable>(std::move(source), weights_.files());
      }
    }
    return table;
  }

  Result<Norm> load_norm(const std::string& module, int64_t size) {
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
  Result<Linear> load_stacked(int64_t layer,
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
    auto linear = Linear::prepare(parts, bias, backend_, options_.max_batch_tokens);
    weights_.release(parts);
    return linear.ok() ? std::move(linear)
                       : linear.status().with_context(name(projections[0].role, layer));
  }

  Result<DecoderLayer> load_layer(int64_t layer) {
    NIBBLE_ASSIGN_OR_RETURN(Attention attention, load_attention(layer));
    if (has_experts(config_, layer)) {
      NIBBLE_ASSIGN_OR_RETURN(Moe moe, load_moe(layer));
      return DecoderLayer{.attention = std::move(attention), .mlp = std::move(moe)};
    }
    NIBBLE_ASSIGN_OR_RETURN(Mlp mlp, load_mlp(layer));
    return DecoderLayer{.attention = std::move(attention), .mlp = std::move(mlp)};
  }

  Result<Attention> load_attention(int64_t layer) {
    const int64_t q_width = config_.num_heads * config_.head_dim;
    const int64_t kv_width = config_.num_kv_heads * config_.head_dim;
    NIBBLE_ASSIGN_OR_RETURN(Norm norm,
                            load_norm(name(Role::kAttentionNorm, layer), config_.hidden_size));
    NIBBLE_ASSIGN_OR_RETURN(
        Linear qkv,
        load_stacked(layer,
                     {{Role::kQuery, q_width}, {Role::kKey, kv_width}, {Role::kValue, kv_width}},
                     config_.hidden_size, config_.qkv_bias ? Bias::kStored : Bias::kNone));
    NIBBLE_ASSIGN_OR_RETURN(
        Linear output, load_stacked(layer, {{Role::kAttentionOutput, config_.hidden_size}}, q_width,
                                    config_.output_bias ? Bias::kStored : Bias::kNone));
    std::optional<Norm> q_norm;
    std::optional<Norm> k_norm;
    if (config_.qk_norm) {
      NIBBLE_ASSIGN_OR_RETURN(q_norm, load_norm(name(Role::kQueryNorm, layer), config_.head_dim));
      NIBBLE_ASSIGN_OR_RETURN(k_norm, load_norm(name(Role::kKeyNorm, layer), config_.head_dim));
    }
    DeviceBuffer sinks;
    if (config_.sinks) {
      NIBBLE_ASSIGN_OR_RETURN(const auto stored,
                              weights_.vector(name(Role::kSinks, layer), config_.num_heads));
      NIBBLE_ASSIGN_OR_RETURN(sinks, backend_.upload(stored));
    }
    NIBBLE_ASSIGN_OR_RETURN(const auto kv_scales, weights_.kv_scales(layer));
    layers_with_kv_scales_ += kv_scales ? 1 : 0;
    const AttentionShape shape{
        .heads = config_.num_heads,
        .kv_heads = config_.num_kv_heads,
        .head_dim = config_.head_dim,
        .sliding_window = config_.sliding_windows[static_cast<size_t>(layer)],
        .kv_scales = kv_scales.value_or(KvScales{})};
    return Attention(Attention::Parts{.norm = std::move(norm),
                                      .qkv = std::move(qkv),
                                      .output = std::move(output),
                                      .q_norm = std::move(q_norm),
                                      .k_norm = std::move(k_norm),
                                      .sinks = std::move(sinks)},
                     shape, rope_);
  }

  Result<Mlp> load_mlp(int64_t layer) {
    const Bias bias = config_.mlp_bias ? Bias::kStored : Bias::kNone;
    const int64_t width = config_.intermediate_size;
    NIBBLE_ASSIGN_OR_RETURN(Norm norm, load_norm(name(Role::kMlpNorm, layer), config_.hidden_size));
    std::vector<Projection> projections = {{Role::kUp, width}};
    if (has_gate(config_.activation)) {
      projections.insert(projections.begin(), {Role::kGate, width});
    }
    NIBBLE_ASSIGN_OR_RETURN(Linear up, load_stacked(layer, projections, config_.hidden_size, bias));
    NIBBLE_ASSIGN_OR_RETURN(Linear down,
                            load_stacked(layer, {{Role::kDown, config_.hidden_size}}, width, bias));
    return Mlp({.norm = std::move(norm),
                .up = std::move(up),
                .down = std::move(down),
                .activation = config_.activation});
  }

  Result<Moe> load_moe(int64_t layer) {
    NIBBLE_ASSIGN_OR_RETURN(Norm norm, load_norm(name(Role::kMlpNorm, layer), config_.hidden_size));
    NIBBLE_ASSIGN_OR_RETURN(
        auto experts,
        load_experts({.config = config_,
                      .weights = weights_,
                      .backend = backend_,
                      .max_rows = options_.max_batch_tokens,
                      .note = [this](const MappedLinear& part) { note_scheme(part); }},
                     layer));
    NIBBLE_ASSIGN_OR_RETURN(auto shared, load_shared_expert(layer));
    return Moe(
        {.norm = std::move(norm), .experts = std::move(experts), .shared = std::move(shared)},
        config_);
  }

  Result<std::unique_ptr<Moe::Shared>> load_shared_expert(int64_t layer) {
    const MoeConfig& moe = config_.moe;
    const int64_t hidden = config_.hidden_size;
    if (moe.shared_width == 0) {
      return std::unique_ptr<Moe::Shared>();
    }
    NIBBLE_ASSIGN_OR_RETURN(Linear gate_up, load_stacked(layer,
                                                         {{Role::kSharedGate, moe.shared_width},
                                                          {Role::kSharedUp, moe.shared_width}},
                                                         hidden, Bias::kNone));
    NIBBLE_ASSIGN_OR_RETURN(Linear down, load_stacked(layer, {{Role::kSharedDown, hidden}},
                                                      moe.shared_width, Bias::kNone));
    DeviceBuffer gate;
    if (moe.shared_gate) {
      NIBBLE_ASSIGN_OR_RETURN(
          const auto stored,
          weights_.numbers(name(Role::kSharedExpertGate, layer) + ".weight", {1, hidden}));
      NIBBLE_ASSIGN_OR_RETURN(gate, backend_.upload(stored));
    }
    return std::make_unique<Moe::Shared>(Moe::Shared{
        .gate_up = std::move(gate_up), .down = std::move(down), .gate = std::move(gate)});
  }

  Result<Linear> load_head(const std::string& module) {
    std::vector<MappedLinear> parts(1);
    NIBBLE_ASSIGN_OR_RETURN(parts[0],
                            weights_.linear(module, config_.vocab_size, config_.hidden_size));
    parts[0].act.format = activations_of(parts[0], config_.dtype);
    auto head = Linear::prepare(parts, {}, backend_, options_.max_logit_rows);
    weights_.release(parts);
    return head;
  }

  /// What runs as a GGUF file has it is called as there. F32 and F16 are read but have no row in
  /// the table of schemes.
  static std::string_view format_name(const MappedLinear& part) {
    const TensorInfo& tensor = *part.tensors.front();
    if (tensor.blocks != nullptr && part.decoded.empty()) {
      return tensor.blocks->name;
    }
    const WeightCode code = part.weight.format.code;
    const std::string_view listed = scheme_name(part.weight.format, part.act.format);
    return !listed.empty()            ? listed
           : code == WeightCode::kF32 ? "f32"
           : code == WeightCode::kF16 ? "f16"
                                      : "unlisted";
  }

  /// The scheme of the model is that of its layers; "mixed" when they differ.
  void note_scheme(const MappedLinear& part) {
    const std::string_view name = format_name(part);
    if (scheme_.empty()) {
      scheme_ = name;
    } else if (scheme_ != name) {
      scheme_ = "mixed";
    }
  }

  const ModelConfig& config_;
  WeightLoader& weights_;
  Backend& backend_;
  const ModelOptions& options_;
  std::shared_ptr<const RopeTable> rope_;
  std::string scheme_;
  int64_t layers_with_kv_scales_ = 0;
};

}  // namespace

Result<std::unique_ptr<Model>> load_model(const std::string& model_dir,
                                          Backend& backend,
                                          const ModelOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig stored, load_model_config(model_dir));
  NIBBLE_RETURN_IF_ERROR(check_blocks(stored));
  const RunsFormat runs = [&](const WeightFormat& format, int64_t k) {
    const bool bf16 = stored.dtype == DType::kBF16;
    return backend.check_gemm(format, bf16 ? ActFormat::kBf16 : ActFormat::kFloat, k).ok();
  };
  NIBBLE_ASSIGN_OR_RETURN(WeightLoader weights, WeightLoader::open(model_dir, stored, runs));
  const ModelConfig& config = weights.config();
  DecoderLoader loader(config, weights, backend, options);
  const auto start = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(DecoderParts parts, loader.load());
  const std::chrono::duration<double> loading = std::chrono::steady_clock::now() - start;
  NIBBLE_LOG(kDebug, "{}: {:.2f} GB of weights were read and prepared in {:.2f} s", model_dir,
             static_cast<double>(weights.total_bytes()) / 1e9, loading.count());
  parts.folder = model_dir;
  NIBBLE_RETURN_IF_ERROR(weights.check_all_used());
  weights.report_decoded();
  NIBBLE_LOG(kInfo, "{}: {}, {} layers, {}, on {}", model_dir, config.architecture,
             config.num_layers, parts.scheme, backend.name());
  return Decoder::create(std::move(parts), backend, options);
}

}  // namespace nibble
