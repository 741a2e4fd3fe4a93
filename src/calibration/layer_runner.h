#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "backend/open_backend.h"
#include "kvcache/paged_kv_cache.h"
#include "model/decoder_scratch.h"
#include "model/layer_loader.h"

namespace nibble {

/// Runs a model's layers one at a time, as the engine does, and by their parts. Nothing but one
/// layer is in memory. One thread at a time.
class LayerRunner final {
 public:
  /// max_rows: longest window. The errors of load_model() and open_backend(); kUnsupported for
  /// latent attention on a device that is not the host.
  static Result<std::unique_ptr<LayerRunner>> open(const std::string& model_dir,
                                                   int64_t max_rows,
                                                   const BackendOptions& options);
  /// On the CPU.
  static Result<std::unique_ptr<LayerRunner>> open(const std::string& model_dir,
                                                   int64_t max_rows,
                                                   int threads);

  [[nodiscard]] const ModelConfig& config() const { return weights_.config(); }
  [[nodiscard]] Backend& backend() { return *backend_; }
  /// Tokens of a page of the cache.
  [[nodiscard]] int64_t page_size() const { return page_size_; }
  /// Bytes of a row of the residual stream (f32), and of the scratch kAttended and kUp.
  [[nodiscard]] int64_t row_bytes(ScratchName name) const;
  [[nodiscard]] int64_t hidden_row_bytes() const { return config().hidden_size * 4; }

  /// Until unload() the module has these weights wherever it is loaded.
  void substitute(const std::string& module, QuantTensor weight, const ActSpec& act) {
    weights_.substitute(module, std::move(weight), act);
  }
  Status load_attention(int64_t layer);
  Status load_mlp(int64_t layer);
  /// The norm in front of the output head.
  Result<Norm> final_norm() {
    return loader_.norm(module_name(*config().family, Role::kFinalNorm), config().hidden_size);
  }
  /// Whether some of a layer is loaded.
  [[nodiscard]] bool in_layer() const { return attention_.has_value(); }
  /// Lets the layer go, with what was substituted in it.
  void unload();

  [[nodiscard]] DType activation_type() const { return backend_->activation_type(config().dtype); }
  /// Whether attention is of latent rows: it is run as a whole, and nobody sees what its products
  /// multiply.
  [[nodiscard]] bool has_latent_attention() const { return config().latent.kv_rank > 0; }
  /// kUnsupported for those who need to see that.
  [[nodiscard]] Status refuse_latent_attention() const;
  [[nodiscard]] Attention& attention() { return std::get<Attention>(*attention_); }
  /// hidden() += attention, of either kind.
  void add_attention(ForwardContext& context);
  [[nodiscard]] bool has_experts() const { return std::holds_alternative<Moe>(*mlp_); }
  [[nodiscard]] Mlp& mlp() { return std::get<Mlp>(*mlp_); }
  [[nodiscard]] Moe& experts() { return std::get<Moe>(*mlp_); }

  /// hidden [max_rows, hidden] f32 := embedding of the tokens.
  void embed(std::span<const int32_t> tokens);
  /// After the last embed(): frees the tables, as large as layers.
  void release_embeddings() { embeddings_ = {}; }
  /// Runs work on a window's rows, from position 0 on.
  void run(std::span<const int32_t> tokens, const std::function<void(ForwardContext&)>& work);

  /// Of those that a device has, so that copies run beside steps (CalibrationMath::kSlots), the
  /// hidden rows that hidden() is from here on; hosts have one.
  void select(int slot) { slot_ = static_cast<size_t>(slot); }
  [[nodiscard]] float* hidden() { return hidden_.at(slot_).as<float>(); }
  [[nodiscard]] std::span<std::byte> hidden_rows(int64_t rows);
  [[nodiscard]] std::span<std::byte> scratch_rows(ScratchName name, int64_t rows);

 private:
  LayerRunner(WeightLoader weights, std::unique_ptr<Backend> backend, const ModelOptions& options);
  Status prepare();

  std::unique_ptr<Backend> backend_;
  WeightLoader weights_;
  ModelOptions options_;
  LayerLoader loader_;
  Embeddings embeddings_;
  std::optional<std::variant<Attention, LatentAttention>> attention_;
  std::optional<std::variant<Mlp, Moe>> mlp_;
  std::optional<PagedKvCache> cache_;  // of the layer
  std::vector<int32_t> pages_;
  int64_t page_size_ = 0;
  std::vector<DeviceBuffer> hidden_;
  size_t slot_ = 0;
  std::array<DeviceBuffer, kScratchNames> scratch_;
};

}  // namespace nibble
