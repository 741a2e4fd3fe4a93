#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arch/family.h"
#include "base/file.h"
#include "base/log.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/kv_sidecar.h"
#include "model/decoder.h"
#include "model/layer_loader.h"
#include "model/made_model.h"
#include "model/weight_loader.h"

namespace nibble {

namespace {

constexpr int64_t kLayersAhead = 4;  // layers whose weights the disk reads while one is packed

/// Loads the parts of one model, one after the other.
class DecoderLoader final {
 public:
  DecoderLoader(const std::string& folder,
                WeightLoader& weights,
                Backend& backend,
                const ModelOptions& options)
      : folder_(folder),
        config_(weights.config()),
        weights_(weights),
        backend_(backend),
        options_(options),
        layers_(config_, weights, backend, options.max_batch_tokens) {}

  Result<DecoderParts> load() {
    NIBBLE_RETURN_IF_ERROR(check_share());
    NIBBLE_RETURN_IF_ERROR(layers_.prepare());
    NIBBLE_RETURN_IF_ERROR(load_kv_sidecar());
    NIBBLE_ASSIGN_OR_RETURN(Embeddings embeddings, load_embeddings(config_, weights_, backend_));
    // The head, the largest matrix, comes first: its file pages are gone before the layers are
    // there.
    NIBBLE_ASSIGN_OR_RETURN(const std::string head_module, weights_.head_module());
    weights_.read_ahead(head_module);
    for (int64_t index = 0; index < kLayersAhead; ++index) {
      weights_.read_ahead(index);
    }
    NIBBLE_ASSIGN_OR_RETURN(Linear head, load_head(head_module));
    std::vector<DecoderLayer> layers;
    for (int64_t index = 0; index < config_.num_layers; ++index) {
      // Packing is faster than disks: what comes next is read meanwhile.
      weights_.read_ahead(index + kLayersAhead);
      NIBBLE_ASSIGN_OR_RETURN(DecoderLayer layer, layers_.layer(index));
      layers.push_back(std::move(layer));
    }
    NIBBLE_ASSIGN_OR_RETURN(Norm norm, layers_.norm(module_name(*config_.family, Role::kFinalNorm),
                                                    config_.hidden_size));
    weights_.release_all();
    log_kv_scales();
    return DecoderParts{.config = config_,
                        .scheme = layers_.scheme(),
                        .folder = folder_,
                        .embedding = std::move(embeddings.tokens),
                        .positions = std::move(embeddings.positions),
                        .layers = std::move(layers),
                        .final_norm = std::move(norm),
                        .head = std::move(head)};
  }

 private:
  Status check_share() {
    const ExpertShare& share = options_.experts;
    layers_.use(share);
    weights_.use(share);
    if (share.whole() || (has_experts_somewhere(config_) && share.divides(config_.moe.experts))) {
      return {};
    }
    return make_error(StatusCode::kInvalidArgument,
                      "--expert-rank {}/{}: the model's {} experts cannot be shared out evenly so; "
                      "give a rank below a number of devices that divides them",
                      share.rank, share.ranks, config_.moe.experts);
  }

  Status load_kv_sidecar() {
    const std::string path = kv_sidecar_path(folder_);
    const KvFormat format = kv_format(options_.kv_code);
    const bool needed = format.per == KvParameters::kPerChannel;
    if (needed && !file_exists(path)) {
      return refuse_ranges(path, "does not exist");
    }
    if (!format.turned || !file_exists(path)) {
      return {};
    }
    if (config_.latent.kv_rank > 0) {
      NIBBLE_LOG(kWarning,
                 "{}: is not read: rows of latent attention are neither centred nor turned; remove "
                 "it",
                 path);
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(KvSidecar sidecar, read_kv_sidecar(path, kv_sidecar_shape(config_)));
    if (needed && !has_ranges(sidecar)) {
      return refuse_ranges(path, "has no ranges: it was made before there were any, or edited");
    }
    NIBBLE_RETURN_IF_ERROR(warn_of_other_weights(sidecar, path));
    NIBBLE_LOG(kInfo, "{}: decides how keys and values enter the {} cache: {}", path,
               kv_code_name(options_.kv_code), describe(sidecar));
    layers_.use(std::move(sidecar), options_.kv_code);
    return {};
  }

  /// Those of another model of this shape change no more than what codes lose.
  [[nodiscard]] Status warn_of_other_weights(const KvSidecar& sidecar,
                                             const std::string& path) const {
    if (sidecar.weights.empty() || weights_.total_bytes() == 0) {
      return {};  // not known, or made weights
    }
    NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(folder_));
    const std::string digest = kv_weights_digest(reader, config_);
    if (digest != sidecar.weights) {
      NIBBLE_LOG(kWarning,
                 "{}: field weights_xxh64: is {}, but the model's keys and values are made by {}: "
                 "means and ranges of other weights lose more, those of another model most; make "
                 "the file with nibble calibrate-kv {} --calibrate TEXT",
                 path, sidecar.weights, digest, folder_);
    }
    return {};
  }

  [[nodiscard]] Status refuse_ranges(const std::string& path, std::string_view why) const {
    return make_error(StatusCode::kInvalidArgument,
                      "--kv-cache-dtype {} needs each channel's range, but {} {}; make it with "
                      "nibble calibrate-kv {} --calibrate TEXT, or choose another --kv-cache-dtype",
                      kv_code_name(options_.kv_code), path, why, folder_);
  }

  void log_kv_scales() const {
    if (layers_.layers_with_kv_scales() > 0) {
      NIBBLE_LOG(kInfo,
                 "{} of {} layers have scales for keys and values in FP8 (k_scale, v_scale): "
                 "--kv-cache-dtype fp8 uses them, other caches need none",
                 layers_.layers_with_kv_scales(), config_.num_layers);
    }
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

  const std::string& folder_;
  const ModelConfig& config_;
  WeightLoader& weights_;
  Backend& backend_;
  const ModelOptions& options_;
  LayerLoader layers_;
};

}  // namespace

Result<std::unique_ptr<Model>> load_model(const std::string& model_dir,
                                          Backend& backend,
                                          const ModelOptions& options) {
  return load_model(model_dir, backend, options, {});
}

Result<std::unique_ptr<Model>> load_model(const std::string& model_dir,
                                          Backend& backend,
                                          const ModelOptions& options,
                                          std::vector<ReplacedWeights> replaced) {
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig stored, load_model_config(model_dir));
  const RunsFormat runs = [&](const WeightFormat& format, int64_t k) {
    const bool bf16 = stored.dtype == DType::kBF16;
    return backend.check_gemm(format, bf16 ? ActFormat::kBf16 : ActFormat::kFloat, k).ok();
  };
  const FmpqUse use = options.ignore_fmpq ? FmpqUse::kIgnored : FmpqUse::kApplied;
  NIBBLE_ASSIGN_OR_RETURN(WeightLoader weights, WeightLoader::open(model_dir, stored, runs, use));
  for (ReplacedWeights& one : replaced) {
    weights.substitute(one.module, std::move(one.weight), one.act);
  }
  const ModelConfig& config = weights.config();
  DecoderLoader loader(model_dir, weights, backend, options);
  const auto start = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(DecoderParts parts, loader.load());
  const std::chrono::duration<double> loading = std::chrono::steady_clock::now() - start;
  NIBBLE_LOG(kDebug, "{}: {:.2f} GB of weights were read and prepared in {:.2f} s", model_dir,
             static_cast<double>(weights.total_bytes()) / 1e9, loading.count());
  if (replaced.empty()) {
    if (options.experts.whole()) {
      NIBBLE_RETURN_IF_ERROR(weights.check_all_used());
    }
    weights.report_decoded();
    NIBBLE_LOG(kInfo, "{}: {}, {} layers, {}, on {}", model_dir, config.architecture,
               config.num_layers, parts.scheme, backend.name());
  }
  return Decoder::create(std::move(parts), backend, options);
}

Result<std::unique_ptr<Model>> load_made_model(const MadeModel& made,
                                               Backend& backend,
                                               const ModelOptions& options) {
  WeightLoader weights = WeightLoader::of_made(made.path, made.config, made.maker);
  NIBBLE_ASSIGN_OR_RETURN(DecoderParts parts,
                          DecoderLoader(made.path, weights, backend, options).load());
  return Decoder::create(std::move(parts), backend, options);
}

}  // namespace nibble
