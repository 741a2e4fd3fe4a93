#include "eval/perplexity.h"

#include <cmath>
#include <limits>
#include <map>
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
    ASSERT_EQ(out.size(), batch.logit_rows.size() * 4);
    for (const SequenceSpan& span : batch.sequences) {
      ASSERT_EQ(span.kv_len - span.q_len, seen_in_window(span));
    }
    for (size_t row = 0; row < batch.logit_rows.size(); ++row) {
      const int32_t token = batch.tokens[static_cast<size_t>(batch.logit_rows[row])];
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
  // Sequences are told apart by their pages.
  int32_t seen_in_window(const SequenceSpan& span) {
    if (span.kv_len == span.q_len) {
      window_of_[span.pages] = window_lengths.size();
      window_lengths.push_back(0);
    }
    int32_t& length = window_lengths[window_of_[span.pages]];
    const int32_t seen = length;
    length += span.q_len;
    return seen;
  }

  ModelConfig config_;
  float favour_;
  std::map<const int32_t*, size_t> window_of_;
};

std::vector<EvalWindow> windows_of(const std::vector<int32_t>& text, size_t window) {
  std::vector<EvalWindow> windows;
  for (size_t at = 0; at + window <= text.size(); at += window) {
    const auto begin = text.begin() + static_cast<std::ptrdiff_t>(at);
    windows.push_back({.tokens = {begin, begin + static_cast<std::ptrdiff_t>(window)}});
  }
  return windows;
}

/// Three windows at a time, in steps of up to 64 tokens and 40 rows.
Result<PerplexityResult> evaluate(Model& model,
                                  const std::vector<EvalWindow>& windows,
                                  std::vector<int64_t>* done = nullptr) {
  const KvSpec layer{.kv_heads = 1, .key_dim = 2, .value_dim = 2};
  LogitReader reader =
      LogitReader::create(
          model,
          {.layers = {layer}, .longest = 160, .sequences = 3, .limits = {.tokens = 64, .rows = 40}})
          .value();
  ThreadPool pool(2);
  return evaluate_perplexity(reader, windows, {.pool = pool, .progress = [&](int64_t at) {
                                                 if (done != nullptr) {
                                                   done->push_back(at);
                                                 }
                                               }});
}

TEST(Perplexity, OfEqualOddsIsTheVocabulary) {
  Oracle model(1);
  const auto result = evaluate(model, {{.tokens = {0, 2, 1, 0, 2, 2}}});
  ASSERT_TRUE(result.ok());
  EXPECT_NEAR(result->perplexity, 4, 1e-6);
  EXPECT_EQ(result->scored_tokens, 5);
  EXPECT_NEAR(result->nll_sum, 5 * std::log(4.0), 1e-6);
}

// 0 -> 1 -> 2 are favoured (5/8 each), 2 -> 2 is not (1/8).
TEST(Perplexity, EqualsTheHandComputedValue) {
  Oracle model(5);
  const auto result = evaluate(model, {{.tokens = {0, 1, 2, 2}}});
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->scored_tokens, 3);
  EXPECT_NEAR(result->perplexity, std::cbrt(1 / (0.625 * 0.625 * 0.125)), 1e-5);
}

// Windows 0 1 2 | 2 0 1 | 2 2: the first token of each is context only, the rest is dropped.
TEST(Perplexity, WindowsDoNotOverlap) {
  Oracle model(5);
  const auto result = evaluate(model, windows_of({0, 1, 2, 2, 0, 1, 2, 2}, 3));
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
  const auto result = evaluate(model, windows_of(text, 150));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->scored_tokens, 298);
  EXPECT_NEAR(result->perplexity, 1.6, 1e-5);
  EXPECT_THAT(model.window_lengths, ElementsAre(149, 149));
}

// 2 -> 2 alone is scored: the beginning is context.
TEST(Perplexity, ScoresFromWhereTheWindowSays) {
  Oracle model(5);
  const auto result = evaluate(model, {{.tokens = {0, 1, 2, 2}, .first_scored = 3}});
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->scored_tokens, 1);
  EXPECT_NEAR(result->perplexity, 8, 1e-5);
}

TEST(Perplexity, StandardErrorIsThatOfTheMeanLogarithm) {
  Oracle model(5);
  const auto result = evaluate(model, {{.tokens = {0, 1, 2, 2}}});
  ASSERT_TRUE(result.ok());
  const double likely = -std::log(0.625);
  const double unlikely = -std::log(0.125);
  const double mean = (2 * likely + unlikely) / 3;
  const double squares =
      2 * (likely - mean) * (likely - mean) + (unlikely - mean) * (unlikely - mean);
  EXPECT_NEAR(result->nll.error, std::sqrt(squares / 2 / 3), 1e-6);
}

TEST(Perplexity, ReportsProgressAfterEachGroupOfWindows) {
  Oracle model(1);
  std::vector<int64_t> done;
  ASSERT_TRUE(evaluate(model, windows_of({0, 1, 2, 0, 1, 0, 1, 2, 2}, 2), &done).ok());
  EXPECT_THAT(done, ElementsAre(3, 4));
}

TEST(Perplexity, RefusesTokensOutsideTheVocabulary) {
  Oracle model(1);
  for (const int32_t token : {-1, 4}) {
    const Status status = evaluate(model, {{.tokens = {0, token, 1}}}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("token id"));
  }
}

TEST(Perplexity, RefusesLogitsThatAreNotNumbers) {
  Oracle model(1);
  const Status status = evaluate(model, windows_of({0, 1, 2, kBroken, 0, 1}, 3)).status();
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("window 1"));
}

TEST(LogitReader, RefusesSequencesLongerThanTheContext) {
  Oracle model(1);
  const KvSpec layer{.kv_heads = 1, .key_dim = 2, .value_dim = 2};
  const Status status = LogitReader::create(model, {.layers = {layer}, .longest = 201}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("200"));
}

}  // namespace
}  // namespace nibble
