#pragma once

#include "backend/cuda/row_kernels.h"

namespace nibble::cuda {

/// activation_quantize() of rows that are turned: of checked arguments, their stride given.
cudaError_t turned_activation(const ActivationArgs& args, const LaunchContext& context);

}  // namespace nibble::cuda
