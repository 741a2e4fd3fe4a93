#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "eval/divergence.h"
#include "eval/kept_base.h"
#include "eval_model.h"

namespace nibble {

/// Measures how far a model goes from itself when some of its weights are stored otherwise: what
/// `nibble eval kld MODEL VARIANT` gives, without a folder of the variant.
class VariantMeter final {
 public:
  /// Runs the model over the windows, whose logits stay in memory. pool must outlive the meter.
  static Result<std::unique_ptr<VariantMeter>> open(const ModelFlags& flags,
                                                    std::vector<EvalWindow> windows,
                                                    ThreadPool& pool);

  Result<DivergenceResult> measure(std::vector<ReplacedWeights> replaced);

 private:
  VariantMeter(std::vector<EvalWindow> windows, ThreadPool& pool)
      : windows_(std::move(windows)), pool_(pool) {}

  std::vector<EvalWindow> windows_;
  ThreadPool& pool_;
  std::string dir_;
  EvalModel base_;
  LogitReader::Options options_;
  std::optional<KeptBase> rows_;
};

}  // namespace nibble
