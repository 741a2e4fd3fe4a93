#include "eval/divergence.h"

#include <cmath>
#include <filesystem>
#include <random>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "eval/protocol.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;

/// Seventeen tokens; logits are a fixed function of the token and of `seed`, alone.
class Hashed final : public Model {
 public:
  explicit Hashed(uint32_t seed) : seed_(seed) {
    config_.vocab_size = 17;
    config_.max_position = 200;
  }
  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string_view scheme() const override { return "fake"; }
  [[nodiscard]] int64_t weight_bytes() const override { return 0; }
  void forward(const StepInput& batch, PagedKvCache& /*cache*/, std::span<float> out) override {
    for (size_t row = 0; row < batch.logit_rows.size(); ++row) {
      const auto logits = logits_after(batch.tokens[static_cast<size_t>(batch.logit_rows[row])]);
      std::ranges::copy(logits, out.begin() + static_cast<std::ptrdiff_t>(row * 17));
    }
  }
  [[nodiscard]] std::vector<float> logits_after(int32_t token) const {
    std::mt19937 random(seed_ * 100 + static_cast<uint32_t>(token));
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> logits(17);
    std::ranges::generate(logits, [&] { return normal(random); });
    return logits;
  }

 private:
  ModelConfig config_;
  uint32_t seed_;
};

LogitReader reader_of(Model& model) {
  const KvSpec layer{.kv_heads = 1, .key_dim = 2, .value_dim = 2};
  return LogitReader::create(model, {.layers = {layer},
                                     .longest = 100,
                                     .sequences = 2,
                                     .limits = {.tokens = 16, .rows = 5}})
      .value();
}

std::vector<EvalWindow> some_windows() {
  std::mt19937 random(5);
  std::vector<EvalWindow> windows;
  for (const int64_t size : {30, 7, 2, 80, 30}) {
    EvalWindow& window = windows.emplace_back();
    window.first_scored = size / 3 + 1;
    for (int64_t i = 0; i < size; ++i) {
      window.tokens.push_back(static_cast<int32_t>(random() % 17));
    }
  }
  return windows;
}

std::vector<double> softmax(const std::vector<float>& logits) {
  std::vector<double> p(logits.begin(), logits.end());
  double sum = 0;
  for (double& x : p) {
    sum += x = std::exp(x);
  }
  for (double& x : p) {
    x /= sum;
  }
  return p;
}

/// KL divergences of all scored tokens, straight from their definition.
std::vector<double> divergences(const Hashed& base, const Hashed& model) {
  std::vector<double> out;
  for (const EvalWindow& window : some_windows()) {
    for (size_t i = static_cast<size_t>(window.first_scored); i < window.tokens.size(); ++i) {
      const auto p = softmax(base.logits_after(window.tokens[i - 1]));
      const auto q = softmax(model.logits_after(window.tokens[i - 1]));
      double& kl = out.emplace_back(0);
      for (size_t token = 0; token < p.size(); ++token) {
        kl += p[token] * std::log(p[token] / q[token]);
      }
    }
  }
  return out;
}

std::string path_in_tmp(const std::string& name) {
  std::string path =
      (std::filesystem::path(::testing::TempDir()) / (name + std::to_string(::getpid()))).string();
  std::filesystem::remove(path);
  return path;
}

BaseFacts facts(BasePrecision precision) {
  const auto windows = some_windows();
  EvalText text{.windows = windows};
  return {.model = "m",
          .kv_cache_dtype = "bf16",
          .protocol = "ours",
          .window = 80,
          .vocab_size = 17,
          .rows = text.scored(),
          .digest = digest_text(digest_of_windows(windows)),
          .precision = precision};
}

TEST(Divergence, OfTwoModelsEqualsItsDefinition) {
  Hashed base(1);
  Hashed model(2);
  LogitReader base_reader = reader_of(base);
  LogitReader reader = reader_of(model);
  LiveBase live(base_reader);
  ThreadPool pool(2);
  const auto windows = some_windows();
  const auto found = evaluate_divergence(live, reader, windows, {.pool = pool});
  ASSERT_TRUE(found.ok());
  std::vector<double> expected = divergences(base, model);
  EXPECT_EQ(found->tokens, std::ssize(expected));
  EXPECT_NEAR(found->kl.mean, estimate_of(expected).mean, 1e-10);
  EXPECT_NEAR(found->kl.error, estimate_of(expected).error, 1e-10);
  std::ranges::sort(expected);
  EXPECT_NEAR(found->largest, expected.back(), 1e-10);
  EXPECT_NEAR(found->p90, quantile(expected, 0.9), 1e-10);
  EXPECT_NEAR(found->log_ratio.mean, found->nll.mean - found->base_nll.mean, 1e-12);
  int64_t tokens = 0;
  double sum = 0;
  for (const DivergenceBucket& bucket : found->buckets) {
    tokens += bucket.tokens;
    sum += bucket.kl.mean * static_cast<double>(bucket.tokens);
  }
  EXPECT_EQ(tokens, found->tokens);
  EXPECT_NEAR(sum / static_cast<double>(tokens), found->kl.mean, 1e-12);
  EXPECT_EQ(found->buckets.front().to, 15);
  EXPECT_EQ(found->buckets.back().from, 64);  // windows of 80
}

TEST(Divergence, HistogramHasEveryTokenOnce) {
  std::vector<PlacedDivergence> tokens;
  for (const double kl : {0.0, 1e-9, 2e-7, 0.02, 0.03, 0.03, 7.0}) {
    tokens.push_back({.at = {.kl = kl}, .context = 1});
  }
  const auto bins = summarize(tokens).histogram;
  EXPECT_EQ(bins.front().tokens, 2);
  EXPECT_EQ(bins.back().tokens, 1);
  EXPECT_GT(bins.back().to, 7.0);
  EXPECT_LE(bins.back().from, 7.0);
  int64_t sum = 0;
  for (size_t i = 0; i < bins.size(); ++i) {
    sum += bins[i].tokens;
    if (i > 1) {
      EXPECT_NEAR(bins[i].to / bins[i].from, std::pow(10.0, 0.25), 1e-9);
      EXPECT_EQ(bins[i].from, bins[i - 1].to);
    }
    if (bins[i].from <= 0.03 && 0.03 < bins[i].to) {  // from 10^-1.75, which is 0.018
      EXPECT_EQ(bins[i].tokens, 3);
    }
  }
  EXPECT_EQ(sum, 7);
}

TEST(Divergence, OfAModelWithItselfIsNothing) {
  Hashed base(1);
  Hashed model(1);
  LogitReader base_reader = reader_of(base);
  LogitReader reader = reader_of(model);
  LiveBase live(base_reader);
  ThreadPool pool(1);
  const auto found = evaluate_divergence(live, reader, some_windows(), {.pool = pool});
  ASSERT_TRUE(found.ok());
  EXPECT_NEAR(found->largest, 0, 1e-14);
  EXPECT_EQ(found->same_top.mean, 1);
  EXPECT_EQ(found->delta_p_rms.mean, 0);
  EXPECT_EQ(found->log_ratio.mean, 0);
}

class BaseFiles : public ::testing::TestWithParam<BasePrecision> {};

TEST_P(BaseFiles, GiveWhatTheModelItselfGives) {
  const std::string path = path_in_tmp("base_rows");
  Hashed base(1);
  Hashed model(2);
  LogitReader base_reader = reader_of(base);
  LogitReader reader = reader_of(model);
  ThreadPool pool(2);
  const auto windows = some_windows();
  const EvalRun run{.pool = pool};
  auto writer = BaseFileWriter::create(path, facts(GetParam()));
  ASSERT_TRUE(writer.ok());
  EXPECT_FALSE(std::filesystem::exists(path));  // not before it is whole
  ASSERT_TRUE(save_base(base_reader, windows, run, *writer).ok());
  auto file = FileBase::open(path, pool);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->facts().digest, facts(GetParam()).digest);
  const auto found = evaluate_divergence(*file, reader, windows, {.pool = pool});
  LiveBase live(base_reader);
  const auto expected = evaluate_divergence(live, reader, windows, run);
  ASSERT_TRUE(found.ok() && expected.ok());
  const double error = GetParam() == BasePrecision::kF32 ? 0 : 1e-4;
  EXPECT_NEAR(found->kl.mean, expected->kl.mean, error);
  EXPECT_NEAR(found->base_nll.mean, expected->base_nll.mean, error);
  EXPECT_EQ(found->nll.mean, expected->nll.mean);
  EXPECT_EQ(BaseFileWriter::create(path, facts(GetParam())).status().code(),
            StatusCode::kAlreadyExists);
}

INSTANTIATE_TEST_SUITE_P(All,
                         BaseFiles,
                         ::testing::Values(BasePrecision::kF32, BasePrecision::kU16),
                         [](const auto& info) {
                           return std::string(base_precision_name(info.param));
                         });

TEST(BaseFile, RowsOfSixteenBitsKeepTheirBound) {
  std::vector<float> logits = {-1e30F, 12, -30, 11.9999F, 3, -27.9F, 12};
  std::vector<std::byte> stored(static_cast<size_t>(base_row_bytes(BasePrecision::kU16, 7)));
  std::vector<float> read(7, -1);
  encode_base_row(BasePrecision::kU16, logits, stored);
  decode_base_row(BasePrecision::kU16, stored, read);
  EXPECT_FLOAT_EQ(read[0], -28);  // 40 nats under the likeliest
  EXPECT_FLOAT_EQ(read[2], -28);
  for (const size_t i : {1U, 3U, 4U, 5U, 6U}) {
    EXPECT_NEAR(read[i], logits[i], 4e-4);
  }
  logits.assign(7, 5);  // equal odds: a step of nothing
  encode_base_row(BasePrecision::kU16, logits, stored);
  decode_base_row(BasePrecision::kU16, stored, read);
  EXPECT_EQ(read, logits);
}

TEST(BaseFile, DamagedOnesAreRefused) {
  const std::string path = path_in_tmp("damaged_rows");
  ThreadPool pool(1);
  Hashed base(1);
  LogitReader reader = reader_of(base);
  auto writer = BaseFileWriter::create(path, facts(BasePrecision::kU16));
  ASSERT_TRUE(save_base(reader, some_windows(), {.pool = pool}, *writer).ok());
  const auto whole = std::filesystem::file_size(path);
  for (const auto size : {whole - 1, uintmax_t{80}, uintmax_t{17}, uintmax_t{16}, uintmax_t{3}}) {
    std::filesystem::resize_file(path, size);
    const Status status = FileBase::open(path, pool).status();
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << size << status.message();
  }
  std::filesystem::remove(path);
  EXPECT_EQ(FileBase::open(path, pool).status().code(), StatusCode::kNotFound);
}

TEST(BaseFile, DigestKnowsTokensAndWindows) {
  const Digest digest = digest_of_windows(some_windows());
  auto other = some_windows();
  other[2].tokens[0] ^= 1;
  EXPECT_NE(digest_of_windows(other), digest);
  other = some_windows();
  other[3].first_scored += 1;
  EXPECT_NE(digest_of_windows(other), digest);
  EXPECT_EQ(digest_of_windows(some_windows()), digest);
}

}  // namespace
}  // namespace nibble
