// A random model with layer norms, an MLP without a gate and learned positions, in integers: the
// GPU computes what the CPU does, and each request's positions are its own, in recorded steps, too.

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_info.h"
#include "backend/cuda/testing/gpu_test.h"
#include "engine/engine_core.h"
#include "model/model.h"
#include "model/testing/distance.h"
#include "model/testing/sequence_runner.h"
#include "quantizer/quantize.h"
#include "synthetic/dummy.h"
#include "tested_families.h"

namespace nibble {
namespace {

class CudaLearnedPositions : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const auto device = cuda::query_device(0);
    if (!device.ok()) {
      GTEST_SKIP() << device.status().message();
    }
    const auto folder = std::filesystem::temp_directory_path() /
                        ("nibble_cuda_positions_" + std::to_string(::getpid()));
    const std::string path = folder.string() + ".json";
    std::ofstream(path) << R"({"architectures": ["OPTForCausalLM"], "hidden_size": 512,
        "ffn_dim": 1024, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 1024,
        "max_position_embeddings": 300})";
    const auto made = make_dummy_checkpoint({.config = path,
                                             .destination = folder,
                                             .dtype = DType::kBF16,
                                             .existing = ExistingOutput::kReplace});
    ASSERT_TRUE(made.ok()) << made.status().message();
    QuantizeOptions options;
    options.source = folder;
    options.destination = folder.string() + "_" + GetParam();
    options.plan.rules.scheme = find_scheme(GetParam()).value();
    options.existing = ExistingOutput::kReplace;
    const auto report = quantize_checkpoint(options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    folder_ = options.destination;
    cuda_ = make_cuda_backend({}, tested_families()).value();
  }

  static std::vector<int32_t> tokens(int32_t count, int32_t seed) {
    std::vector<int32_t> out;
    for (int32_t i = 0; i < count; ++i) {
      out.push_back(3 + (i * i * 7 + i + seed * 31) % 1000);
    }
    return out;
  }

  std::unique_ptr<Model> load(Backend& backend) {
    auto model = load_model(folder_, backend, {.max_batch_tokens = 512, .max_logit_rows = 512});
    EXPECT_TRUE(model.ok()) << model.status().message();
    return std::move(model).value();
  }

  /// Greedy answers to prompts that are there at once.
  std::vector<std::vector<int32_t>> answers(const std::vector<std::vector<int32_t>>& prompts) {
    EngineOptions options;
    options.max_num_seqs = 8;
    options.max_num_batched_tokens = 512;
    auto model = load(*cuda_);
    options = EngineCore::resolve(options, model->config(), cuda_.get()).value();
    EXPECT_EQ(options.max_model_len, 300);
    auto core = EngineCore::create(std::move(model), options).value();
    std::vector<std::vector<int32_t>> out(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      Request request;
      request.prompt = prompts[i];
      request.max_tokens = cuda::testing::brief_tests() ? 8 : 60;
      request.ignore_eos = true;
      request.sampling.temperature = 0;
      request.on_event = [&out, i](const TokenEvent& event) {
        EXPECT_TRUE(event.failure.ok()) << event.failure.message();
        out[i].push_back(event.token);
      };
      core->add(std::move(request));
    }
    while (core->step()) {
    }
    return out;
  }

  std::string folder_;
  std::unique_ptr<Backend> cuda_;
};

TEST_P(CudaLearnedPositions, LogitsAreTheCpus) {
  const auto cpu = make_cpu_backend({.threads = cuda::testing::brief_tests() ? 2 : 0}).value();
  const std::vector<int32_t> ids = tokens(cuda::testing::brief_tests() ? 108 : 300, 0);
  const auto on_cpu = load(*cpu);
  const auto on_gpu = load(*cuda_);
  const auto expected = SequenceRunner(*on_cpu, *cpu, KvCode::kBf16).feed_in_chunks(ids, 1, 100);
  const auto actual = SequenceRunner(*on_gpu, *cuda_, KvCode::kBf16).feed_in_chunks(ids, 1, 100);
  const double error = distance(actual, expected);
  std::printf("%s: distance %.6f\n", GetParam().c_str(), error);
  EXPECT_LE(error, 0.01);
}

TEST_P(CudaLearnedPositions, AnswersDoNotDependOnTheBatch) {
  std::vector<std::vector<int32_t>> prompts;
  for (const int32_t length : {150, 20, 1, 100}) {
    prompts.push_back(tokens(length, static_cast<int32_t>(prompts.size())));
  }
  const auto together = answers(prompts);
  for (size_t i = 0; i < together.size(); ++i) {
    EXPECT_EQ(together[i], answers({prompts[i]})[0]) << "prompt " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Integers,
                         CudaLearnedPositions,
                         ::testing::Values("w8a8_int8", "w4a8"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace nibble
