#include "calibration/float_inputs.h"

namespace nibble {

Status FloatInputs::reserve() {
  LayerRunner& runner = parts_.runner;
  const int64_t bytes = parts_.windows.rows() * runner.config().hidden_size *
                        dtype_bits(runner.activation_type()) / 8;
  NIBBLE_ASSIGN_OR_RETURN(normed_, runner.backend().allocate(static_cast<size_t>(bytes)));
  return {};
}

Status FloatInputs::read(Kept what, int64_t window) {
  const auto bytes = static_cast<size_t>(parts_.windows.bytes(what));
  if (rows_.size() < bytes) {
    NIBBLE_ASSIGN_OR_RETURN(rows_, parts_.runner.backend().allocate(bytes));
  }
  if (parts_.device == nullptr) {
    return parts_.windows.read(what, window, {rows_.as<std::byte>(), bytes});
  }
  staged_.resize(bytes);
  NIBBLE_RETURN_IF_ERROR(parts_.windows.read(what, window, staged_));
  parts_.device->math().upload(rows_.as<void>(), staged_);
  return {};
}

ConstActivations FloatInputs::normalize(const ForwardContext& context) {
  LayerRunner& runner = parts_.runner;
  ForwardContext other = context;
  const Activations normed(normed_.as<void>(), runner.activation_type());
  other.scratch.set(ScratchName::kNormed, normed);
  runner.experts().normalize(rows(), other);
  return normed;
}

}  // namespace nibble
