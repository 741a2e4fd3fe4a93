#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/calibration/kernels.h"
#include "backend/cuda/calibration/refine_block.h"

namespace nibble::cuda {

// What refining codes and scales computes beside products. As in kernels.h all pointers are device
// memory, and calls are stream-ordered, allocate nothing, and give the same bytes in every run.

/// Every code of a block anew, column by column, each given all others (RowSweep).
cudaError_t sweep_block(const RefineBlockArgs& args, const ValueForm& form, cudaStream_t stream);

/// The scales of groups that lie in one block, one after the other (RowFit).
cudaError_t fit_block(const RefineBlockArgs& args, StoredScale type, cudaStream_t stream);

/// A group of more columns than a block has: its scale is fitted in three steps, with the product
/// of H and its steps between the first two.
struct WideFitArgs {
  float* values = nullptr;          // [k, stride]
  float* gradients = nullptr;       // [k, stride]: (H + damping) e of e = w - value
  float* scales = nullptr;          // [stride]: the group's
  float* steps = nullptr;           // [width, stride]: codes less their zero points
  const float* products = nullptr;  // [k, stride]: of H and the steps
  float* moved = nullptr;           // [stride]: by how much scales became less
  int64_t k = 0;
  int64_t stride = 0;  // rows, a multiple of 64
  int64_t begin = 0;   // columns of the group
  int64_t width = 0;
  float damping = 0;
  StoredScale type = StoredScale::kF32;
};
/// Fills the steps.
cudaError_t take_steps(const WideFitArgs& args, cudaStream_t stream);
/// Fills `moved`, and replaces scales, values and gradients.
cudaError_t fit_wide(const WideFitArgs& args, cudaStream_t stream);

}  // namespace nibble::cuda
