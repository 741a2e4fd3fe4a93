#pragma once

#include <vector>

#include "eval/base_rows.h"
#include "eval/perplexity.h"

namespace nibble {

/// Logits of a base that many models are compared with, in memory: rows x vocab_size x 4 bytes.
class KeptBase final : public BaseRows {
 public:
  /// Runs the base over the windows. The errors of evaluate_perplexity().
  static Result<KeptBase> run(LogitReader& reader, std::span<const EvalWindow> windows);

  /// The first of the windows begins anew.
  void rewind() { next_ = 0; }
  Status begin(std::span<const Feed> /*feeds*/) override { return {}; }
  Result<std::span<const float>> next(int64_t rows) override;
  [[nodiscard]] Status explain_not_finite() const override;

 private:
  explicit KeptBase(const Model& model) : model_(&model) {}

  const Model* model_;  // of the base
  std::vector<std::vector<float>> steps_;
  size_t next_ = 0;
};

}  // namespace nibble
