#pragma once

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/testing/gpu_test.h"
#include "backend/prepared_experts.h"

namespace nibble::cuda::testing {

/// y [m, hidden] of rows that held 1 before, on the GPU.
inline std::vector<float> run(PreparedExperts& experts,
                              const std::vector<uint16_t>& x,
                              int64_t m,
                              int64_t hidden) {
  const DeviceArray<uint16_t> rows(x);
  const DeviceArray<float> y(std::vector<float>(static_cast<size_t>(m * hidden), 1.0F));
  experts.run({.x = {rows.data(), DType::kBF16},
               .x_stride = hidden,
               .m = m,
               .y = y.data(),
               .y_stride = hidden});
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return y.host();
}

/// The same of experts on the CPU.
inline std::vector<float> run_on_cpu(PreparedExperts& experts,
                                     const std::vector<uint16_t>& x,
                                     int64_t m,
                                     int64_t hidden) {
  std::vector<float> y(static_cast<size_t>(m * hidden), 1.0F);
  experts.run({.x = {x.data(), DType::kBF16},
               .x_stride = hidden,
               .m = m,
               .y = y.data(),
               .y_stride = hidden});
  return y;
}

}  // namespace nibble::cuda::testing
