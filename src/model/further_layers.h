#pragma once

#include "arch/config.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"

namespace nibble {

/// Whether the layers that predict further tokens (num_nextn_predict_layers) are stored whole or
/// not at all. They are not run; one in part is what an interrupted download or conversion leaves,
/// and what reads the checkpoint with them would fail late. kNotFound naming the missing tensor.
/// For models with latent attention.
Status check_further_layers(const CheckpointReader& reader, const ModelConfig& config);

}  // namespace nibble
