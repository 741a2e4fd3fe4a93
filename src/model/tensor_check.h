#pragma once

#include <string>
#include <string_view>

#include "arch/config.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"

namespace nibble {

/// Whether a tensor that the model does not read may be there all the same: the rotation's
/// frequencies, which follow from config.json; layers that predict further tokens; and a bias of
/// zeros where the family has none, which GPTQ's tools write.
[[nodiscard]] bool may_stay_unread(const TensorInfo& tensor, const ModelConfig& config);
/// The error of a tensor that the model does not read: kUnsupported, naming it and the remedy.
[[nodiscard]] Status unread_error(const CheckpointReader& reader, const TensorInfo& tensor);

/// Compares the tensors of a model folder with what its config.json describes, from headers alone
/// and however the matrices are stored: each is there in its shape, and no other is, save those
/// that may_stay_unread(). Errors: kNotFound, kCorrupt and kUnsupported naming the tensor, and
/// those of load_model_config() but kUnsupported: of an architecture or field that this build does
/// not run nobody here knows the tensors, which is no error. Nor is a folder without config.json.
Status check_model_tensors(const std::string& model_dir);

/// Whether load_model() would take a model folder, from headers, scales and vectors alone: its
/// error.
Status check_loadable(const std::string& model_dir);

}  // namespace nibble
