#pragma once

#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/latent.h"

namespace nibble::cuda {

constexpr int kMostLatentDim = 1024;  // numbers of a row

/// Whether the current device has kernels of warpgroup products for the shape.
[[nodiscard]] bool latent_on_sm90(const LatentShape& shape);
/// How a step becomes a line, for these.
[[nodiscard]] LineForm latent_line(const LatentShape& shape);

[[nodiscard]] size_t latent_workspace_sm90(const LatentShape& shape);
cudaError_t decode_latent_sm90(const LatentLaunch& args, const LaunchContext& context);
cudaError_t prefill_latent_sm90(const LatentLaunch& args, const LaunchContext& context);

/// All rows of the step, by a kernel for any shape and device.
cudaError_t plain_latent(const LatentLaunch& args, const LaunchContext& context);

}  // namespace nibble::cuda
