#include "model/blocks.h"

#include "arch/tensors.h"

namespace nibble {

Status check_turned_inputs(const ModelConfig& config, const std::vector<TurnedInputs>& turned) {
  if (turned.empty()) {
    return {};
  }
  for (const ModelTensor& tensor : list_tensors(config)) {
    if (tensor.kind != TensorKind::kMatrix || tensor.role == Role::kEmbedding) {
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const int64_t turn,
                            turn_of(turned, tensor.module, tensor.shape.back()));
    if (turn != 0 && tensor.role != Role::kDown && tensor.role != Role::kSharedDown) {
      return make_error(StatusCode::kUnsupported,
                        "{}: turns the input of {}; this build turns those of an MLP's down alone. "
                        "Quantize from a checkpoint without transforms",
                        turned.front().where, tensor.module);
    }
  }
  return {};
}

}  // namespace nibble
