// Whole models on the GPU: their logits beside the CPU's, and what the engine makes of them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_info.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/file.h"
#include "greedy_answers.h"
#include "model/model.h"
#include "model/testing/distance.h"
#include "model/testing/sequence_runner.h"
#include "storyteller_in.h"
#include "tested_families.h"
#include "text/tokenizer.h"

namespace nibble {
namespace {

constexpr const char* kModel = kStoryteller;

/// Tokens of a test's sequence: the first 100 are one prompt.
size_t test_length() { return cuda::testing::brief_tests() ? 108 : 150; }

std::vector<int32_t> text_tokens(size_t count) {
  const auto tokenizer = Tokenizer::load(kModel).value();
  const std::string text = read_file("tests/data/text/the_black_cat.txt").value();
  std::vector<int32_t> tokens = tokenizer->encode(text, SpecialTokens::kPlain).value();
  tokens.resize(count);
  return tokens;
}

/// How the largest logits of rows [vocab] agree.
struct Agreement {
  double share = 0.0;    // of rows where they are the same token's
  double parting = 0.0;  // elsewhere: how far b's logit of a's token lies below b's largest, at
                         // most, over the root mean square of the row
};

Agreement agreement(const std::vector<float>& a, const std::vector<float>& b, int64_t vocab) {
  const int64_t rows = std::ssize(b) / vocab;
  Agreement out;
  for (int64_t row = 0; row < rows; ++row) {
    const auto mine = std::span(a).subspan(static_cast<size_t>(row * vocab), vocab);
    const auto other = std::span(b).subspan(static_cast<size_t>(row * vocab), vocab);
    const auto token = static_cast<size_t>(std::ranges::max_element(mine) - mine.begin());
    const auto largest = std::ranges::max_element(other);
    if (static_cast<size_t>(largest - other.begin()) == token) {
      out.share += 1.0 / static_cast<double>(rows);
      continue;
    }
    double squares = 0.0;
    for (const float logit : other) {
      squares += static_cast<double>(logit) * logit;
    }
    const double rms = std::sqrt(squares / static_cast<double>(vocab));
    out.parting = std::max(out.parting, (*largest - other[token]) / rms);
  }
  return out;
}

class CudaModel : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const auto device = cuda::query_device(0);
    if (!device.ok()) {
      GTEST_SKIP() << device.status().message();
    }
    folder_ = storyteller_in(GetParam());
    cuda_ = make_cuda_backend({}, tested_families()).value();
    // Several at once go to brief tests.
    cpu_ = make_cpu_backend({.threads = cuda::testing::brief_tests() ? 2 : 0}).value();
  }

  std::unique_ptr<Model> load(Backend& backend, KvCode code = KvCode::kBf16) {
    auto model = load_model(folder_, backend,
                            {.max_batch_tokens = 512, .max_logit_rows = 512, .kv_code = code});
    EXPECT_TRUE(model.ok()) << model.status().message();
    return std::move(model).value();
  }

  std::string folder_;
  std::unique_ptr<Backend> cuda_;
  std::unique_ptr<Backend> cpu_;
};

// CPU and GPU round to BF16 at the same places, but sums in other orders, fixed point beside INT4
// in groups on the CPU and, but for INT8 products over a BF16 cache, a faster form of e^x move some
// numbers across a boundary, and then some rounded activations by a step: logits may differ by as
// much as the scheme itself costs, and 1 %; and the likeliest token may be another one where the
// two are that near: the largest difference of two logits is within six times it, as the scheme's
// own is. INT8 products over a BF16 cache have one arithmetic on both.
TEST_P(CudaModel, LogitsAreTheCpusWithinTheSchemesOwnError) {
  constexpr double kStep = 0.01;
  const std::vector<int32_t> tokens = text_tokens(test_length());
  const auto unquantized = load_model(kModel, *cpu_, {.max_logit_rows = 512}).value();
  const auto ideal =
      SequenceRunner(*unquantized, *cpu_, KvCode::kBf16).feed_in_chunks(tokens, 1, 100);
  const bool integer = GetParam() == "w8a8_int8" || GetParam() == "w4a8";
  for (const KvCode code : {KvCode::kBf16, KvCode::kInt8, KvCode::kInt4, KvCode::kInt4Page}) {
    const auto on_cpu = load(*cpu_, code);
    const auto on_gpu = load(*cuda_, code);
    const int64_t vocab = on_cpu->config().vocab_size;
    const auto expected = SequenceRunner(*on_cpu, *cpu_, code).feed_in_chunks(tokens, 1, 100);
    const auto actual = SequenceRunner(*on_gpu, *cuda_, code).feed_in_chunks(tokens, 1, 100);
    const double error = distance(actual, expected);
    const double own_error = distance(expected, ideal);
    const Agreement found = agreement(actual, expected, vocab);
    const Agreement own = agreement(expected, ideal, vocab);
    std::printf(
        "%-12s kv %d: distance %.5f (scheme %.5f), same top token %.3f (%.3f), "
        "else below it by %.4f (%.4f)\n",
        GetParam().c_str(), static_cast<int>(code), error, own_error, found.share, own.share,
        found.parting, own.parting);
    EXPECT_LE(error, integer && code == KvCode::kBf16 ? kStep : kStep + own_error);
    EXPECT_GE(found.share, own.share - 0.05);
    EXPECT_LE(found.parting, 6 * (kStep + own_error));
  }
}

// The kernels of prefill and decode sum in other orders.
TEST_P(CudaModel, ChunksAndStepsGiveTheLogitsOfOnePrefill) {
  const std::vector<int32_t> tokens = text_tokens(test_length());
  const auto model = load(*cuda_);
  const auto whole = SequenceRunner(*model, *cuda_, KvCode::kBf16).feed(tokens);
  const auto served = SequenceRunner(*model, *cuda_, KvCode::kBf16).feed_in_chunks(tokens, 1, 37);
  EXPECT_LE(distance(served, whole), 0.04);
}

int64_t answer_length() { return cuda::testing::brief_tests() ? 8 : 40; }

/// Greedy answers of `batch` requests through the engine.
std::vector<std::vector<int32_t>> answers(const std::string& folder, Backend& backend, int batch) {
  const std::vector<int32_t> tokens = text_tokens(200);
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < batch; ++i) {
    prompts.emplace_back(tokens.begin() + i, tokens.begin() + 20 + 7 * i);
  }
  return greedy_answers(folder, backend, prompts, {.max_tokens = 40, .max_model_len = 1024});
}

/// How far the largest logit after `context` lies above those of two tokens, at most.
double distance_to_top(Model& model, Backend& backend, std::vector<int32_t> context, int a, int b) {
  const auto logits = SequenceRunner(model, backend, KvCode::kBf16).feed(context);
  const auto last = logits.end() - model.config().vocab_size;
  return *std::max_element(last, logits.end()) - std::min(last[a], last[b]);
}

// Products of integers give the same sums in any batch. Those of BF16 and FP8 come from kernels
// that add in other orders where there are fewer rows, so an answer may change, at a near tie.
TEST_P(CudaModel, AnswersDoNotDependOnTheBatch) {
  constexpr double kNearTie = 0.1;
  const auto many = answers(folder_, *cuda_, 5);
  const auto one = answers(folder_, *cuda_, 1);
  ASSERT_EQ(std::ssize(one[0]), answer_length());
  for (const auto& answer : many) {
    EXPECT_EQ(std::ssize(answer), answer_length());
  }
  const bool integers = GetParam() == "w4a8" || GetParam() == "w8a8_int8";
  const auto [alone, beside] = std::mismatch(one[0].begin(), one[0].end(), many[0].begin());
  if (integers || alone == one[0].end()) {
    EXPECT_EQ(many[0], one[0]);
    return;
  }
  std::vector<int32_t> context = text_tokens(20);
  context.insert(context.end(), one[0].begin(), alone);
  const auto model = load(*cuda_);
  EXPECT_LE(distance_to_top(*model, *cuda_, std::move(context), *alone, *beside), kNearTie)
      << "from token " << alone - one[0].begin();
}

INSTANTIATE_TEST_SUITE_P(
    Schemes,
    CudaModel,
    testing::Values(
        "bf16", "w4a16_g32", "w4a16_g128", "w4a8", "w8a8_int8", "w8a8_fp8", "w8a8_fp8_block"),
    [](const auto& info) { return info.param; });

}  // namespace
}  // namespace nibble
