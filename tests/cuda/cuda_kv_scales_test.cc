// The scales of FP8 caches that a checkpoint stores, on the GPU.

#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_info.h"
#include "model/model.h"
#include "model/testing/distance.h"
#include "model/testing/large_kv.h"
#include "model/testing/sequence_runner.h"
#include "tested_families.h"

namespace nibble {
namespace {

constexpr const char* kSource = "models/storyteller";

/// Logits of a prompt and the steps behind it.
std::vector<float> logits(const std::string& folder, Backend& backend, KvCode code) {
  auto model = load_model(folder, backend, {.max_batch_tokens = 512, .max_logit_rows = 512});
  CHECK_MSG(model.ok(), "{}", model.status().message());
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 108; ++i) {
    tokens.push_back(3 + (i * i * 7 + i) % 120);
  }
  return SequenceRunner(**model, backend, code).feed_in_chunks(tokens, 1, 100);
}

TEST(CudaKvScales, AreThoseThatTheKeysAndValuesNeed) {
  const auto device = cuda::query_device(0);
  if (!device.ok()) {
    GTEST_SKIP() << device.status().message();
  }
  const auto folder = std::filesystem::temp_directory_path() /
                      ("nibble_cuda_kv_scales_" + std::to_string(::getpid()));
  const auto cuda = make_cuda_backend({}, tested_families()).value();
  const auto cpu = make_cpu_backend({}).value();
  const std::vector<float> plain = logits(kSource, *cuda, KvCode::kFp8);
  EXPECT_LE(distance(plain, logits(kSource, *cpu, KvCode::kFp8)), 0.1);
  write_large_kv(kSource, folder, fitting_kv_scales(load_model_config(kSource)->num_layers));
  EXPECT_LE(distance(logits(folder, *cuda, KvCode::kFp8), plain), 1e-3);
  write_large_kv(kSource, folder, {});
  EXPECT_GE(distance(logits(folder, *cuda, KvCode::kFp8), plain), 0.2);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace nibble
