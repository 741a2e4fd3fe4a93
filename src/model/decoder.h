#pragma once

#include <array>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/device_buffer.h"
#include "layers/attention.h"
#include "layers/latent_attention.h"
#include "layers/linear.h"
#include "layers/mlp.h"
#include "layers/moe.h"
#include "layers/norm.h"
#include "model/model.h"

namespace nibble {

struct DecoderLayer {
  std::variant<Attention, LatentAttention> attention;
  std::variant<Mlp, Moe> mlp;
};

/// What the loader builds and the decoder owns.
struct DecoderParts {
  ModelConfig config;
  std::string scheme;
  std::string folder;  // that it was loaded from
  std::unique_ptr<PreparedTable> embedding;
  std::unique_ptr<PreparedTable> positions;  // learned ones; null: none
  std::vector<DecoderLayer> layers;
  Norm final_norm;
  Linear head;  // [vocab, hidden]
};

/// The stack of all families: embedding, layers with two residual branches, norm, head.
class Decoder final : public Model {
 public:
  /// Sizes the scratch memory for the largest step. The backend must outlive the model.
  static Result<std::unique_ptr<Model>> create(DecoderParts parts,
                                               Backend& backend,
                                               const ModelOptions& options);

  [[nodiscard]] const ModelConfig& config() const override { return parts_.config; }
  [[nodiscard]] std::string_view scheme() const override { return parts_.scheme; }
  [[nodiscard]] int64_t weight_bytes() const override;
  [[nodiscard]] Status check_weights() const override;
  Result<PagedKvCache> make_cache(const KvCacheShape& shape) override;
  void forward(const StepInput& batch, PagedKvCache& cache, std::span<float> logits) override;
  void final_states(int64_t first, std::span<float> out) override;
  [[nodiscard]] bool samples_tokens() const override { return backend_.samples_tokens(); }
  [[nodiscard]] bool first_steps_are_slow() const override {
    return backend_.first_steps_are_slow();
  }
  void start(const StepInput& batch, PagedKvCache& cache, const SamplingInput& input) override;
  void finish(std::span<SampledRow> out) override;
  [[nodiscard]] ExpertCounts expert_counts() const override { return backend_.expert_counts(); }

 private:
  Decoder(DecoderParts parts, Backend& backend, const ModelOptions& options);

  Status allocate_scratch();
  void check_batch(const StepInput& batch, const PagedKvCache& cache) const;
  void run(const StepInput& batch,
           const PagedKvCache& cache,
           const SamplingInput& sampling,
           float* logits);
  void run_layers(Step& step, const PagedKvCache& cache);
  void write_logits(Step& step, float* logits);

  DecoderParts parts_;
  Backend& backend_;
  ModelOptions options_;
  DType activation_type_;
  // As decoder_scratch() says.
  DeviceBuffer hidden_;        // f32, the residual stream
  DeviceBuffer logit_hidden_;  // f32, its rows whose logits are wanted
  DeviceBuffer logits_;        // f32; empty where the backend writes to the caller's memory
  std::array<DeviceBuffer, kScratchNames> layer_scratch_;  // in activation_type_
};

}  // namespace nibble
