#include "eval/perplexity.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kBroken = 3;  // the token after which this model's logits are NaN

/// Four tokens. After token t, the token (t + 1) mod 3 has the weight `favour`, the other three
/// have weight 1. Checks that each window is fed from its start, without gaps.
class Oracle final : public Model {
 public:
  explicit Oracle(float favour) : favour_(favour) {
    config_.vocab_size = 4;
    config_.max_position = 200;
  }
  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string_view scheme() const override { return "fake"; }
  [[nodiscard]] int64_t weight_bytes() const override { return 0; }

  void forward(const StepInput& batch, PagedKvCache& /*cache*/, std::span<float> out) override {
    ASSERT_EQ(batch.sequences.size(), 1U);
    const SequenceSpan& span = batch.sequences[0];
    const auto rows = static_cast<int32_t>(batch.tokens.size());
    ASSERT_EQ(out.size(), batch.tokens.size() * 4);
    ASSERT_EQ(span.kv_len - rows, seen_in_window(span, rows));
    for (size_t row = 0; row < batch.tokens.size(); ++row) {
      const int32_t token = batch.tokens[row];
      for (size_t next = 0; next < 4; ++next) {
        const bool favoured = static_cast<int32_t>(next) == (token + 1) % 3;
        out[row * 4 + next] = favoured ? std::log(favour_) : 0.0F;
        if (token == kBroken) {
          out[row * 4 + next] = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
  }

  std::vector<int32_t> window_lengths;  // tokens fed, window by window

 private:
  int32_t seen_in_window(const SequenceSpan& span, int32_t rows) {
    const int32_t before = span.kv_len - rows;
    if (before == 0) {
      window_lengths.push_back(0);
    }
    const int32_t seen = window_lengths.back();
    window_lengths.back() += rows;
    return seen;
  }

  ModelConfig config_;
  float favour_;
};

PagedKvCache cache_of(int64_t tokens) {
  const KvSpec layer{.kv_heads = 1, .key_dim = 2, .value_dim = 2};
  return PagedKvCache::allocate(KvCacheShape::equal_pools({layer}, 16, (tokens + 15) / 16)).value();
}

Result<PerplexityResult> evaluate(Model& model, const std::vector<int32_t>& text, int64_t window) {
  PagedKvCache cache = cache_of(160);
  return evaluate_perplexity(model, cache, text, {.window = window, .threads = 2});
}

TEST(Perplexity, OfEqualOddsIsTheVocabulary) {
  Oracle model(1);
  const auto result = evaluate(model, {0, 2, 1, 0, 2, 2}, 100);
  ASSERT_TRUE(result.ok());
  EXPECT_NEAR(result->perplexity, 4, 1e-6);
  EXPECT_EQ(result->scored_tokens, 5);
  EXPECT_NEAR(result->nll_sum, 5 * std::log(4.0), 1e-6);
}

// 0 -> 1 -> 2 are favoured (5/8 each), 2 -> 2 is not (1/8).
TEST(Perplexity, EqualsTheHandComputedValue) {
  Oracle model(5);
  const auto result = evaluate(model, {0, 1, 2, 2}, 100);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->scored_tokens, 3);
  EXPECT_NEAR(result->perplexity, std::cbrt(1 / (0.625 * 0.625 * 0.125)), 1e-5);
}

// Windows 0 1 2 | 2 0 1 | 2 2: the first token of each is context only, the rest is dropped.
TEST(Perplexity, WindowsDoNotOverlap) {
  Oracle model(5);
  const auto result = evaluate(model, {0, 1, 2, 2, 0, 1, 2, 2}, 3);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->scored_tokens, 4);
  EXPECT_NEAR(result->perplexity, 1 / 0.625, 1e-5);      // without the step 2 -> 2 between windows
  EXPECT_THAT(model.window_lengths, ElementsAre(2, 2));  // no window is fed its last token
}

TEST(Perplexity, WindowsLongerThanOneStep) {
  Oracle model(5);
  std::vector<int32_t> text;
  for (int i = 0; i < 300; ++i) {
    text.push_back(i % 3);
  }
  const auto result = evaluate(model, text, 150);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->scored_tokens, 298);
  EXPECT_NEAR(result->perplexity, 1.6, 1e-5);
  EXPECT_THAT(model.window_lengths, ElementsAre(149, 149));
}

TEST(Perplexity, ReportsProgress) {
  Oracle model(1);
  PagedKvCache cache = cache_of(16);
  std::vector<int64_t> done;
  const std::vector<int32_t> text = {0, 1, 2, 0, 1};
  ASSERT_TRUE(
      evaluate_perplexity(model, cache, text,
                          {.window = 2, .progress = [&](int64_t at) { done.push_back(at); }})
          .ok());
  EXPECT_THAT(done, ElementsAre(2, 4));
}

TEST(Perplexity, RefusesImpossibleWindowsAndTexts) {
  Oracle model(1);
  for (const int64_t window : {-1, 0, 1, 161, 201}) {
    const Status status = evaluate(model, {0, 1, 2}, window).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << window;
    EXPECT_THAT(status.message(), HasSubstr("--window"));
  }
  EXPECT_EQ(evaluate(model, {0}, 10).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(evaluate(model, {}, 10).status().code(), StatusCode::kInvalidArgument);
  for (const int32_t token : {-1, 4}) {
    EXPECT_THAT(evaluate(model, {0, token}, 10).status().message(), HasSubstr("token id"));
  }
}

TEST(Perplexity, RefusesLogitsThatAreNotNumbers) {
  Oracle model(1);
  const Status status = evaluate(model, {0, 1, 2, kBroken, 0, 1}, 3).status();
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("window at token 3"));
}

}  // namespace
}  // namespace nibble
