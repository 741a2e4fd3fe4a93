#pragma once

#include <memory>
#include <string>

#include "model/model.h"
#include "model/weight_maker.h"

namespace nibble {

/// What a model without a checkpoint is made of.
struct MadeModel {
  std::string path;  // for messages; an INT4 cache takes what lies there (kv_sidecar_path())
  const ModelConfig& config;
  WeightMaker& maker;
};

/// load_model() of weights that are made, matrix by matrix: none is kept in the host's memory once
/// the backend has it in its own.
Result<std::unique_ptr<Model>> load_made_model(const MadeModel& made,
                                               Backend& backend,
                                               const ModelOptions& options);

}  // namespace nibble
