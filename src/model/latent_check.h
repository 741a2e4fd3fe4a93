#pragma once

#include "arch/config.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"

namespace nibble {

/// Whether a checkpoint holds what latent attention and routers with a correction need, by names
/// and shapes alone, before anything is read or allocated: both halves of each pair of low rank, in
/// the shapes that config.json says, a correction for each expert, and layers that predict further
/// tokens (MTP) whole or not at all. Nothing is checked of other models. Errors name file, tensor,
/// field and remedy: kNotFound for a missing half, kCorrupt for what contradicts config.json,
/// kUnsupported for types. Warns of corrections that are not stored in F32.
Status check_latent_tensors(const CheckpointReader& reader, const ModelConfig& config);

}  // namespace nibble
