#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/launch.h"
#include "base/status.h"
#include "bench/cuda/schedules/nibbles.h"

namespace nibble::cuda {

/// Rows for a product whose activations all have 4 bits: their RMS norm, and codes of it with one
/// scale for a row, as quant/block_rounding.h makes them. In device memory, aligned to 16 bytes.
struct ActRows {
  static constexpr float kEps = 1e-5F, kClip = 0.9F;
  static constexpr int64_t kMostN = 32768;

  const float* x = nullptr;       // [rows, n]
  const float* weight = nullptr;  // [n]
  int64_t rows = 0, n = 0;        // n a multiple of 8, up to kMostN
  ActStore store = ActStore::kBytes;
  void* codes = nullptr;    // [rows, n] int8, or [rows, n / 2] of nibbles.h
  float* scales = nullptr;  // [rows]
};
cudaError_t write_act_rows(const ActRows& args, const LaunchContext& context);

/// Compares codes and scales with double precision, and both ways to store them with each other;
/// prints a line for each width.
Status check_act_rows(cudaStream_t stream);

}  // namespace nibble::cuda
