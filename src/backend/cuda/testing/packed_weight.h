#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/testing/gpu_test.h"
#include "quant/quant_tensor.h"

namespace nibble::cuda::testing {

/// A weight, whose scales are F32, as a kernel packs it; unpacking gives the same codes and scales.
inline std::unique_ptr<DeviceArray<uint8_t>> packed_and_back(const GemmKernel& kernel,
                                                             const QuantTensor& weight) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(weight.codes.data());
  const std::vector<uint8_t> codes(bytes, bytes + weight.codes.size());
  const auto numbers = weight.scales.as<float>();
  const std::vector<float> scales(numbers.begin(), numbers.end());
  const DeviceArray<uint8_t> device_codes(codes), codes_back(codes.size());
  const DeviceArray<float> device_scales(scales), scales_back(scales.size());
  auto packed = std::make_unique<DeviceArray<uint8_t>>(kernel.packed_bytes());
  EXPECT_EQ(kernel.pack(device_codes.data(), device_scales.data(), packed->data(), nullptr),
            cudaSuccess);
  EXPECT_EQ(kernel.unpack(packed->data(), codes_back.data(), scales_back.data(), nullptr),
            cudaSuccess);
  EXPECT_EQ(codes_back.host(), codes);
  EXPECT_EQ(scales_back.host(), scales);
  return packed;
}

}  // namespace nibble::cuda::testing
