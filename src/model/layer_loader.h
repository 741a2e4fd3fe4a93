#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "arch/family.h"
#include "checkpoint/kv_sidecar.h"
#include "model/decoder.h"
#include "model/weight_loader.h"

namespace nibble {

/// Builds the layers of a model, or halves of them, in any order and as often as is wanted, and
/// notes which formats occur.
class LayerLoader final {
 public:
  /// max_rows: of a step. All but the number must outlive the loader.
  LayerLoader(const ModelConfig& config, WeightLoader& weights, Backend& backend, int64_t max_rows);

  /// Uploads what the layers share: before all others.
  Status prepare();
  /// Layers from now on enter caches in `code` as it says, of the model's shape. For int4_static it
  /// has_ranges().
  void use(KvSidecar sidecar, KvCode code) {
    sidecar_ = std::move(sidecar);
    sidecar_code_ = code;
  }
  /// Layers from now on have these experts alone; the number of them must be a multiple.
  void use(const ExpertShare& share) { share_ = share; }
  Result<DecoderLayer> layer(int64_t index);
  Result<Attention> attention(int64_t index);
  Result<LatentAttention> latent_attention(int64_t index);
  Result<std::variant<Mlp, Moe>> mlp(int64_t index);
  Result<Norm> norm(const std::string& module, int64_t size);

  /// Scheme of the layers so far; "mixed" when they differ.
  [[nodiscard]] const std::string& scheme() const { return scheme_; }
  [[nodiscard]] int64_t layers_with_kv_scales() const { return layers_with_kv_scales_; }

 private:
  enum class Bias { kNone, kStored };
  struct Projection {
    Role role;
    int64_t n;
  };

  struct LatentHeads {
    std::unique_ptr<PreparedHeads> keys;
    std::unique_ptr<PreparedHeads> values;
  };

  [[nodiscard]] std::string name(Role role, int64_t layer) const {
    return module_name(*config_.family, role, layer);
  }
  Result<Linear> stacked(int64_t layer,
                         const std::vector<Projection>& projections,
                         int64_t k,
                         Bias bias_mode);
  Result<LatentHeads> latent_heads(int64_t layer);
  Result<std::optional<AttentionBasis>> basis(int64_t layer);
  Result<AttentionBasis> static_basis(const KvSidecar::Layer& stored);
  Result<int64_t> turn(Role role, int64_t layer, int64_t k);
  Result<Mlp> dense(int64_t layer);
  Result<Moe> moe(int64_t layer);
  Result<std::unique_ptr<Moe::Shared>> shared_expert(int64_t layer);
  void note_scheme(const MappedLinear& part);

  const ModelConfig& config_;
  WeightLoader& weights_;
  Backend& backend_;
  int64_t max_rows_;
  ExpertShare share_;
  std::shared_ptr<const RopeTable> rope_;
  std::optional<KvSidecar> sidecar_;
  KvCode sidecar_code_ = KvCode::kInt4;
  std::string scheme_;
  int64_t layers_with_kv_scales_ = 0;
};

/// The tables that rows are looked up in.
struct Embeddings {
  std::unique_ptr<PreparedTable> tokens;
  std::unique_ptr<PreparedTable> positions;  // learned ones; null: none
};

Result<Embeddings> load_embeddings(const ModelConfig& config,
                                   WeightLoader& weights,
                                   Backend& backend);

}  // namespace nibble
