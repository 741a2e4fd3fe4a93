#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "layers/attention.h"
#include "layers/embedding.h"
#include "layers/linear.h"
#include "layers/mlp.h"
#include "layers/norm.h"
#include "model/model.h"

namespace nibble {

struct DecoderLayer {
  Attention attention;
  GatedMlp mlp;
};

/// What the loader builds and the decoder owns.
struct DecoderParts {
  ModelConfig config;
  std::string scheme;
  Embedding embedding;
  std::vector<DecoderLayer> layers;
  RmsNorm final_norm;
  Linear head;  // [vocab, hidden]
};

/// The stack of all dense families: embedding, layers with two residual branches, norm, head.
class Decoder final : public Model {
 public:
  /// Sizes the scratch memory for the largest step. The backend must outlive the model.
  static Result<std::unique_ptr<Model>> create(DecoderParts parts,
                                               Backend& backend,
                                               const ModelOptions& options);

  [[nodiscard]] const ModelConfig& config() const override { return parts_.config; }
  [[nodiscard]] std::string_view scheme() const override { return parts_.scheme; }
  [[nodiscard]] int64_t weight_bytes() const override;
  void forward(const ForwardBatch& batch, PagedKvCache& cache, std::span<float> logits) override;

 private:
  Decoder(DecoderParts parts, Backend& backend, const ModelOptions& options);

  Status allocate_scratch();
  void check_batch(const ForwardBatch& batch,
                   const PagedKvCache& cache,
                   std::span<const float> logits) const;
  void write_logits(std::span<const int32_t> rows, std::span<float> logits);

  DecoderParts parts_;
  Backend& backend_;
  ModelOptions options_;
  // Scratch, f32, each [max_batch_tokens, width], picked_ [max_logit_rows, width].
  Buffer hidden_;  // the residual stream
  Buffer picked_;  // its rows whose logits are wanted
  Buffer qkv_;
  Buffer attended_;
  Buffer gate_up_;
};

}  // namespace nibble
