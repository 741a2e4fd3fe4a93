// Every dense architecture on the GPU: the logits of a random model are the CPU's but for BF16
// between the layers.

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_info.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/file.h"
#include "base/json.h"
#include "model/model.h"
#include "model/testing/distance.h"
#include "model/testing/sequence_runner.h"
#include "synthetic/dummy.h"
#include "tested_families.h"

namespace nibble {
namespace {

struct Architecture {
  const char* golden;  // folder of tests/golden whose config it has, with wider heads
  int64_t head_dim;
  DType dtype;
};

void PrintTo(const Architecture& a, std::ostream* out) {
  *out << a.golden << ", heads of " << a.head_dim << ", " << dtype_name(a.dtype);
}

class CudaArchitectures : public ::testing::TestWithParam<Architecture> {
 protected:
  void SetUp() override {
    const auto device = cuda::query_device(0);
    if (!device.ok()) {
      GTEST_SKIP() << device.status().message();
    }
    const std::string golden = GetParam().golden;
    folder_ = std::filesystem::temp_directory_path() / ("nibble_cuda_" + golden);
    Json config = Json::parse(read_file("tests/golden/" + golden + "/config.json").value()).value();
    config.set("head_dim", GetParam().head_dim);
    const int64_t hidden = config.find("num_attention_heads")->as_int() * GetParam().head_dim;
    config.set("hidden_size", hidden);
    config.set("word_embed_proj_dim", hidden);  // of OPT, as is
    config.set("ffn_dim", 320);
    config.set("intermediate_size", 320);
    const std::string path = folder_.string() + ".json";
    std::ofstream(path) << config.dump();
    const auto made = make_dummy_checkpoint({.config = path,
                                             .destination = folder_,
                                             .dtype = GetParam().dtype,
                                             .existing = ExistingOutput::kReplace});
    ASSERT_TRUE(made.ok()) << made.status().message();
  }

  /// Logits [tokens, vocab] of a prompt and the steps behind it.
  std::vector<float> logits(Backend& backend, KvCode code) {
    auto model = load_model(folder_, backend, {.max_batch_tokens = 512, .max_logit_rows = 512});
    EXPECT_TRUE(model.ok()) << model.status().message();
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < (cuda::testing::brief_tests() ? 108 : 150); ++i) {
      tokens.push_back(3 + (i * i * 7 + i) % 120);
    }
    return SequenceRunner(**model, backend, code).feed_in_chunks(tokens, 1, 100);
  }

  std::filesystem::path folder_;
};

TEST_P(CudaArchitectures, LogitsAreTheCpus) {
  const auto cuda = make_cuda_backend({}, tested_families()).value();
  const auto cpu = make_cpu_backend({.threads = cuda::testing::brief_tests() ? 2 : 0}).value();
  for (const KvCode code : {KvCode::kBf16, KvCode::kInt8}) {
    const double error = distance(logits(*cuda, code), logits(*cpu, code));
    std::printf("%s kv %d: distance %.5f\n", GetParam().golden, static_cast<int>(code), error);
    EXPECT_LE(error, 0.02);
  }
}

INSTANTIATE_TEST_SUITE_P(Dense,
                         CudaArchitectures,
                         ::testing::Values(Architecture{"llama2", 128, DType::kF16},
                                           Architecture{"llama3", 256, DType::kBF16},
                                           Architecture{"llama_bias", 64, DType::kBF16},
                                           Architecture{"llama_dynamic", 64, DType::kF32},
                                           Architecture{"llama_dynamic_long", 128, DType::kBF16},
                                           Architecture{"llama_linear", 64, DType::kBF16},
                                           Architecture{"llama_yarn", 128, DType::kBF16},
                                           Architecture{"mistral", 128, DType::kBF16},
                                           Architecture{"qwen2", 64, DType::kBF16},
                                           Architecture{"qwen2_window", 128, DType::kBF16},
                                           Architecture{"qwen3", 128, DType::kBF16},
                                           Architecture{"opt", 64, DType::kBF16},
                                           Architecture{"starcoder2", 128, DType::kBF16}),
                         [](const auto& info) { return std::string(info.param.golden); });

}  // namespace
}  // namespace nibble
