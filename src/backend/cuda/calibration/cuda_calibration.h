#pragma once

#include <memory>

#include <cuda_runtime_api.h>

#include "backend/calibration_math.h"

namespace nibble::cuda {

/// What a calibration computes beside the steps of a backend, on its stream. kUnavailable without
/// cuBLASLt; kResourceExhausted.
Result<std::unique_ptr<CalibrationMath>> make_cuda_calibration(cudaStream_t stream);

}  // namespace nibble::cuda
