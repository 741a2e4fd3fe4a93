// A model whose RoPE is dynamic, beyond its original length: each request's rotations follow from
// its own prompt, whoever shares its steps, in recorded ones, too.

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
#include "greedy_answers.h"
#include "quantizer/quantize.h"
#include "tested_families.h"
#include "text/tokenizer.h"

namespace nibble {
namespace {

constexpr const char* kModel = "models/storyteller";
constexpr AnswersShape kAnswers{.max_tokens = 80, .max_model_len = 512};

/// The storyteller in w8a8_int8, whose sums are the same in any batch, had it been made for 64
/// positions.
std::string make_model() {
  const auto source = std::filesystem::temp_directory_path() / "nibble_cuda_dynamic_source";
  std::filesystem::remove_all(source);
  std::filesystem::copy(kModel, source);
  Json config = Json::parse(read_file(std::string(kModel) + "/config.json").value()).value();
  config.set("max_position_embeddings", int64_t{64});
  config.set(
      "rope_parameters",
      Json::parse(R"({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0})").value());
  std::ofstream(source / "config.json") << config.dump();
  QuantizeOptions options;
  options.source = source;
  options.destination = std::filesystem::temp_directory_path() / "nibble_cuda_dynamic";
  options.plan.rules.scheme = find_scheme("w8a8_int8").value();
  options.existing = ExistingOutput::kReplace;
  const auto report = quantize_checkpoint(options);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return options.destination;
}

/// Tokens of a text: prompts that end before position 64, at it and behind it.
std::vector<std::vector<int32_t>> prompts() {
  const auto tokenizer = Tokenizer::load(kModel).value();
  const std::string text = read_file("tests/data/text/the_black_cat.txt").value();
  const std::vector<int32_t> tokens = tokenizer->encode(text, SpecialTokens::kPlain).value();
  std::vector<std::vector<int32_t>> out;
  for (const int length : {150, 20, 64, 100}) {
    const auto begin = tokens.begin() + 200 * std::ssize(out);
    out.emplace_back(begin, begin + length);
  }
  return out;
}

TEST(CudaDynamicRope, AnswersDoNotDependOnTheBatch) {
  const auto device = cuda::query_device(0);
  if (!device.ok()) {
    GTEST_SKIP() << device.status().message();
  }
  const std::string folder = make_model();
  const auto backend = make_cuda_backend({}, tested_families()).value();
  const auto together = greedy_answers(folder, *backend, prompts(), kAnswers);
  for (size_t i = 0; i < together.size(); ++i) {
    EXPECT_EQ(together[i], greedy_answers(folder, *backend, {prompts()[i]}, kAnswers)[0])
        << "prompt " << i;
  }
}

}  // namespace
}  // namespace nibble
