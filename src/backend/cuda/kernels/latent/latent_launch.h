#pragma once

#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/latent.h"

namespace nibble::cuda {

constexpr int kMostLatentDim = 1024;  // numbers of a row

/// Who serves a shape on the current device.
enum class LatentFamily : uint8_t { kWarpgroups, kWarps, kPlain };
[[nodiscard]] LatentFamily latent_family(const LatentShape& shape);
/// How a step becomes a line, for the first two.
[[nodiscard]] LineForm latent_line(const LatentShape& shape);

/// Products of warpgroups, for sm_90a.
cudaError_t decode_latent_sm90(const LatentLaunch& args, const LaunchContext& context);
cudaError_t prefill_latent_sm90(const LatentLaunch& args, const LaunchContext& context);
/// Of the images of a sequence's queries over rows in codes.
[[nodiscard]] size_t latent_image_bytes(const LatentShape& shape);

/// Products of warps over rows in bf16, from sm_80 on.
cudaError_t decode_latent_warps(const LatentLaunch& args, const LaunchContext& context);
cudaError_t prefill_latent_warps(const LatentLaunch& args, const LaunchContext& context);

/// All rows of the step, by a kernel for any shape and device.
cudaError_t plain_latent(const LatentLaunch& args, const LaunchContext& context);

}  // namespace nibble::cuda
