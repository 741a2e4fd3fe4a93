#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_heads.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"

namespace nibble::cuda::testing {

inline std::vector<uint16_t> random_bits(size_t count, uint32_t seed, float spread = 1.0F) {
  const std::vector<float> values = random_values(count, seed, spread);
  std::vector<uint16_t> bits(count);
  std::ranges::transform(values, bits.begin(), f32_to_bf16);
  return bits;
}

/// What products of heads need of a backend.
struct HeadsBench {
  DeviceInfo device = query_device(0).value();
  cudaStream_t stream = nullptr;
  GemmScratch scratch;
  std::unique_ptr<Uploader> uploader;

  HeadsBench() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    uploader = std::make_unique<Uploader>(Uploader::create(stream).value());
  }
  HeadsBench(const HeadsBench&) = delete;
  HeadsBench& operator=(const HeadsBench&) = delete;
  ~HeadsBench() {
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  [[nodiscard]] GemmContext context() {
    return {.device = device, .stream = stream, .scratch = scratch, .uploader = *uploader};
  }
  /// Heads [n, k] each, of `weights` [heads, n, k].
  std::unique_ptr<PreparedHeads> prepare(const std::vector<uint16_t>& weights,
                                         int64_t n,
                                         int64_t k) {
    std::vector<QuantView> views;
    for (size_t at = 0; at < weights.size(); at += static_cast<size_t>(n * k)) {
      views.push_back({.format = {.code = WeightCode::kBf16},
                       .n = n,
                       .k = k,
                       .codes = reinterpret_cast<const std::byte*>(weights.data() + at)});
    }
    auto prepared = CudaHeads::create(views, context());
    EXPECT_TRUE(prepared.ok()) << prepared.status().message();
    return std::move(prepared).value();
  }
};

}  // namespace nibble::cuda::testing
