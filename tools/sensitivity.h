#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "calibration/calibration_text.h"
#include "calibration/output_errors.h"
#include "checkpoint/checkpoint_reader.h"
#include "eval/statistics.h"
#include "eval_model.h"
#include "quantizer/budget/candidates.h"

namespace nibble {

/// What is asked about a model's matrices.
struct SensitivityFlags {
  ModelFlags model;
  std::vector<std::string> schemes;
  std::string format;           // dialect; empty: one that can store all of them
  CalibrationTextOptions text;  // that tells what the matrices multiply; no path: weights alone
  std::string kld_text;         // that divergences are measured over; empty: the same
  double measure = 0.1;         // share of the candidates whose divergence is measured, worst first
  int64_t measure_tokens = 2048;
};

/// Adds --schemes, --calibrate and what goes with them; `flags` must outlive `command`.
void add_sensitivity_flags(CLI::App& command, SensitivityFlags& flags);
/// Of these --schemes, --text, --measure and --measure-tokens.
void add_measure_flags(CLI::App& command, SensitivityFlags& flags);

/// What is known of a candidate.
struct SensitivityItem {
  Candidate candidate;
  SchemeErrors errors;                           // by scheme; of "keep" 0
  bool by_outputs = false;                       // else by the weights alone
  std::vector<std::optional<StoredSize>> sizes;  // by scheme
  std::optional<Estimate> kld;  // nats, with this candidate alone in its worst scheme
  double weight = 1;            // nats per error: loss_weights()

  /// The scheme of the largest error.
  [[nodiscard]] size_t worst() const;
  [[nodiscard]] double worst_error() const { return errors[worst()].value_or(0); }
  /// The predicted divergence in a scheme that fits.
  [[nodiscard]] double loss(size_t scheme) const { return weight * errors[scheme].value_or(0); }
};

/// What each matrix of a model costs in each scheme.
struct Sensitivity {
  std::unique_ptr<CheckpointReader> reader;  // what the candidates' matrices read
  Json config;
  SourceModel source;
  std::vector<SchemeChoice> schemes;
  Dialect dialect = Dialect::kCompressedTensors;
  std::vector<SensitivityItem> items;  // worst first
  int64_t measured_tokens = 0;         // 0: no divergence was measured
};

/// Errors: those of the flags, naming them, of loading and of running the model.
Result<Sensitivity> measure_sensitivity(const SensitivityFlags& flags);

}  // namespace nibble
