#include "backend/cuda/sampling.h"

#include <cmath>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "backend/cuda/testing/gpu_test.h"
#include "ops/sampler.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

constexpr float kInf = std::numeric_limits<float>::infinity();
using Seen = std::unordered_map<int32_t, int32_t>;

/// One row's request.
struct Ask {
  SamplingParams params;
  uint64_t seed = 0;
  int64_t step = 0;
  int logprobs = -1;
  Seen seen;
  std::vector<int32_t> banned;
  std::vector<uint32_t> mask;  // empty: none
};

RowSampling to_device(const Ask& ask) {
  RowSampling out{.seed = ask.seed,
                  .step = ask.step,
                  .top_p = ask.params.top_p,
                  .min_p = static_cast<float>(ask.params.min_p),
                  .top_k = static_cast<int32_t>(ask.params.top_k),
                  .logprobs = ask.logprobs};
  if (ask.params.temperature != 0) {
    out.inverse_temperature = static_cast<float>(1.0 / std::max(ask.params.temperature, 1e-6));
  }
  return out;
}

/// The edits that a row's bias, penalties and bans come to.
void add_edits(const Ask& ask, int32_t row, std::vector<LogitEdit>& edits) {
  std::unordered_map<int32_t, LogitEdit> by_token;
  const auto edit_of = [&](int32_t token) -> LogitEdit& {
    LogitEdit& edit = by_token[token];
    edit.row = row;
    edit.token = token;
    return edit;
  };
  for (const auto& [token, bias] : ask.params.logit_bias) {
    edit_of(token).bias = bias;
  }
  if (Sampler::needs_seen(ask.params)) {
    for (const auto& [token, count] : ask.seen) {
      edit_of(token).repetition = static_cast<float>(ask.params.repetition_penalty);
      if (count > 0) {
        edit_of(token).penalty =
            static_cast<float>(ask.params.presence_penalty + ask.params.frequency_penalty * count);
      }
    }
  }
  for (const int32_t token : ask.banned) {
    edit_of(token).bias = -kInf;
  }
  for (const auto& [token, edit] : by_token) {
    edits.push_back(edit);
  }
}

struct Samples {
  std::vector<int32_t> tokens;
  std::vector<SampleStatus> status;
  std::vector<float> logprobs;
  std::vector<TopLogprob> top;
};

Samples sample_on_gpu(const std::vector<float>& logits,
                      int64_t vocab,
                      int64_t stride,
                      const std::vector<Ask>& asks) {
  const auto rows = static_cast<int64_t>(asks.size());
  std::vector<RowSampling> sampling;
  std::vector<LogitEdit> edits;
  for (const Ask& ask : asks) {
    add_edits(ask, static_cast<int32_t>(sampling.size()), edits);
    sampling.push_back(to_device(ask));
  }
  std::vector<int32_t> mask_of;
  std::vector<uint32_t> masks(1);  // never empty: an array on the GPU
  int32_t masked = 0;
  for (const Ask& ask : asks) {
    mask_of.push_back(ask.mask.empty() ? -1 : masked++);
    masks.insert(masks.end() - 1, ask.mask.begin(), ask.mask.end());
  }
  const std::vector<int32_t> count = {static_cast<int32_t>(edits.size())};
  edits.resize(edits.size() + 3, {.row = 0, .token = 0, .bias = 100.0F});  // behind the count
  const DeviceArray<float> device_logits(logits);
  const DeviceArray<RowSampling> device_sampling(sampling);
  const DeviceArray<LogitEdit> device_edits(edits);
  const DeviceArray<int32_t> device_count(count);
  const DeviceArray<int32_t> device_mask_of(mask_of);
  const DeviceArray<uint32_t> device_masks(masks);
  const DeviceArray<int32_t> tokens(asks.size());
  const DeviceArray<SampleStatus> status(asks.size());
  const DeviceArray<float> logprobs(asks.size());
  const DeviceArray<TopLogprob> top(asks.size() * kMaxTopLogprobs);
  const int64_t max_rows = rows + 5;
  const auto max_edits = static_cast<int64_t>(edits.size());
  DeviceArray<uint8_t> workspace(sample_workspace_bytes(max_rows, max_edits));
  workspace.zero();
  const SampleArgs args{.logits = device_logits.data(),
                        .stride = stride,
                        .rows = rows,
                        .vocab = vocab,
                        .sampling = device_sampling.data(),
                        .edits = device_edits.data(),
                        .edit_count = device_count.data(),
                        .max_edits = max_edits,
                        .mask_of = masked > 0 ? device_mask_of.data() : nullptr,
                        .masks = masked > 0 ? device_masks.data() : nullptr,
                        .tokens = tokens.data(),
                        .status = status.data(),
                        .logprobs = logprobs.data(),
                        .top = top.data(),
                        .workspace = workspace.data(),
                        .max_rows = max_rows};
  EXPECT_EQ(sample_tokens(args, {}), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint8_t> left = workspace.host();
  for (size_t i = 0; i < static_cast<size_t>(8 * max_rows * 2049); ++i) {
    if (left[i] != 0) {  // best keys and histograms
      ADD_FAILURE() << "the workspace is not left zero at " << i;
      break;
    }
  }
  return {tokens.host(), status.host(), logprobs.host(), top.host()};
}

Result<SampledToken> sample_on_cpu(
    const std::vector<float>& logits, int64_t vocab, int64_t stride, size_t row, const Ask& ask) {
  const auto begin = logits.begin() + static_cast<int64_t>(row) * stride;
  std::vector<float> copy(begin, begin + vocab);
  Sampler sampler(vocab);
  return sampler.sample(copy, {.params = ask.params,
                               .seed = ask.seed,
                               .step = ask.step,
                               .seen = ask.seen,
                               .banned = ask.banned,
                               .mask = ask.mask,
                               .top_logprobs = ask.logprobs});
}

/// Number of rows whose token differs from the CPU's.
int count_differences(const std::vector<float>& logits,
                      int64_t vocab,
                      int64_t stride,
                      const std::vector<Ask>& asks) {
  const Samples samples = sample_on_gpu(logits, vocab, stride, asks);
  int differences = 0;
  for (size_t row = 0; row < asks.size(); ++row) {
    const auto wanted = sample_on_cpu(logits, vocab, stride, row, asks[row]);
    EXPECT_TRUE(wanted.ok());
    EXPECT_EQ(samples.status[row], SampleStatus::kOk);
    differences += wanted.value().token != samples.tokens[row] ? 1 : 0;
  }
  return differences;
}

std::vector<Ask> draws(const SamplingParams& params, size_t rows) {
  std::vector<Ask> asks;
  for (size_t row = 0; row < rows; ++row) {
    asks.push_back({.params = params, .seed = 77 + row % 3, .step = static_cast<int64_t>(row)});
  }
  return asks;
}

TEST(Sampling, GreedySamplesTheLargestAndOfEqualsTheFirst) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t vocab : {1, 3, 7, 1000, 8193, 50257, 128256}) {
    for (const int64_t stride : {vocab, vocab + 5}) {
      const size_t rows = 7;
      auto logits = random_values(rows * static_cast<size_t>(stride), 3, 2.0F);
      for (float& logit : logits) {
        logit = std::round(logit * 4) / 4;  // many ties
      }
      for (int64_t i = 0; i < vocab; ++i) {
        logits[static_cast<size_t>(stride + i)] = i % 2 == 0 ? -0.0F : 0.0F;  // both zeros: equal
        logits[static_cast<size_t>(2 * stride + i)] = -3.0e38F;
      }
      EXPECT_EQ(count_differences(logits, vocab, stride, draws({.temperature = 0}, rows)), 0);
    }
  }
}

TEST(Sampling, GreedyCallsTakeTheLikeliest) {
  NIBBLE_NEEDS_GPU();
  const size_t rows = 3;
  const int64_t vocab = 5000;
  const auto logits = random_values(rows * 5000, 17, 2.0F);
  const DeviceArray<float> device_logits(logits);
  const DeviceArray<RowSampling> sampling(
      std::vector<RowSampling>(rows, {.inverse_temperature = 1.0F}));  // not read
  const DeviceArray<int32_t> tokens(rows);
  const DeviceArray<SampleStatus> status(rows);
  DeviceArray<uint8_t> workspace(sample_workspace_bytes(3, 0));
  workspace.zero();
  const SampleArgs args{.range = SampleRange::kGreedy,
                        .logits = device_logits.data(),
                        .stride = vocab,
                        .rows = 3,
                        .vocab = vocab,
                        .sampling = sampling.data(),
                        .tokens = tokens.data(),
                        .status = status.data(),
                        .workspace = workspace.data(),
                        .max_rows = 3};
  for (int call = 0; call < 2; ++call) {
    ASSERT_EQ(sample_tokens(args, {}), cudaSuccess);
    const auto sampled = tokens.host();
    for (size_t row = 0; row < rows; ++row) {
      const Ask greedy{.params = {.temperature = 0}};
      EXPECT_EQ(sampled[row], sample_on_cpu(logits, vocab, vocab, row, greedy).value().token);
    }
  }
}

TEST(Sampling, DrawsAsTheCpuDoes) {
  NIBBLE_NEEDS_GPU();
  const SamplingParams kinds[] = {
      {.temperature = 1.0},
      {.temperature = 0.6},
      {.temperature = 1e-7},
      {.temperature = 1.0, .min_p = 0.05},
      {.temperature = 1.0, .top_k = 1},
      {.temperature = 0.8, .top_k = 40},
      {.temperature = 1.5, .top_k = 1000, .min_p = 0.01},
      {.temperature = 1.0, .top_p = 0.9},
      {.temperature = 0.7, .top_p = 0.2},
      {.temperature = 0.7, .top_k = 50, .top_p = 0.95},
      {.temperature = 1.0, .top_k = 20, .top_p = 0.8, .min_p = 0.1},
      {.temperature = 0.05, .top_k = 1 << 20},
  };
  int differences = 0;
  uint32_t seed = 50;
  for (const SamplingParams& params : kinds) {
    for (const int64_t vocab : {5, 4000, 32001}) {
      if (testing::brief_tests() && vocab > 10000) {
        continue;
      }
      const size_t rows = testing::brief_tests() ? 3 : 64;
      const auto logits = random_values(rows * static_cast<size_t>(vocab), ++seed, 2.5F);
      differences += count_differences(logits, vocab, vocab, draws(params, rows));
    }
  }
  EXPECT_LE(differences, 2);  // of 2304
}

TEST(Sampling, DrawsFromFlatDistributions) {
  NIBBLE_NEEDS_GPU();
  const SamplingParams kinds[] = {
      {.temperature = 1.0},
      {.temperature = 1.0, .top_k = 6000},
      {.temperature = 2.0, .top_p = 0.95},
      {.temperature = 1.0, .top_k = 9000, .top_p = 0.9, .min_p = 0.2},
  };
  int differences = 0;
  uint32_t seed = 150;
  for (const SamplingParams& params : kinds) {
    for (const float spread : {0.0F, 0.01F, 0.5F}) {
      const int64_t vocab = 20000;
      const size_t rows = testing::brief_tests() ? 1 : 8;
      const auto logits = random_values(rows * static_cast<size_t>(vocab), ++seed, spread);
      differences += count_differences(logits, vocab, vocab, draws(params, rows));
    }
  }
  EXPECT_LE(differences, 1);  // of 96
}

TEST(Sampling, AppliesBiasPenaltiesAndBans) {
  NIBBLE_NEEDS_GPU();
  const int64_t vocab = 3000;
  const size_t rows = 48;
  const auto logits = random_values(rows * static_cast<size_t>(vocab), 21, 3.0F);
  std::vector<Ask> asks;
  std::mt19937 generator(4);
  for (size_t row = 0; row < rows; ++row) {
    Ask ask{.params = {.temperature = row % 2 == 0 ? 0.0 : 0.9,
                       .repetition_penalty = 1.3,
                       .presence_penalty = 0.5,
                       .frequency_penalty = 0.25},
            .seed = row};
    for (int i = 0; i < 900; ++i) {
      ask.seen[static_cast<int32_t>(generator() % 3000)] = static_cast<int32_t>(generator() % 4);
    }
    ask.params.logit_bias = {{static_cast<int32_t>(row), 2.0F}, {2999, 11.0F}};
    if (row % 3 == 0) {
      ask.banned = {2999, 5};
    }
    asks.push_back(ask);
  }
  EXPECT_EQ(count_differences(logits, vocab, vocab, asks), 0);
}

TEST(Sampling, ReportsWhatCannotBeSampled) {
  NIBBLE_NEEDS_GPU();
  const int64_t vocab = 9000;
  auto logits = random_values(5 * static_cast<size_t>(vocab), 8, 1.0F);
  logits[8999] = std::nanf("");
  logits[static_cast<size_t>(vocab) + 1] = kInf;
  logits[static_cast<size_t>(2 * vocab) + 4000] = -kInf;
  std::vector<Ask> asks = draws({.temperature = 1.0}, 5);
  for (int32_t token = 0; token < vocab; ++token) {
    asks[3].banned.push_back(token);
  }
  asks[2].banned = {4000};  // an infinity is found even where its token is banned
  const Samples samples = sample_on_gpu(logits, vocab, vocab, asks);
  EXPECT_EQ(samples.status,
            (std::vector{SampleStatus::kNotFinite, SampleStatus::kNotFinite,
                         SampleStatus::kNotFinite, SampleStatus::kNoneLeft, SampleStatus::kOk}));
  for (size_t row = 0; row < 4; ++row) {
    EXPECT_EQ(samples.tokens[row], -1);
  }
  EXPECT_EQ(samples.tokens[4], sample_on_cpu(logits, vocab, vocab, 4, asks[4]).value().token);
}

TEST(Sampling, LogProbabilitiesAreThoseOfTheModel) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t vocab : {3, 1000, 32001}) {
    const size_t rows = 6;
    const auto logits = random_values(rows * static_cast<size_t>(vocab), 31, 3.0F);
    std::vector<Ask> asks = draws({.temperature = 1.0, .top_k = 30}, rows);
    for (size_t row = 0; row < rows; ++row) {
      asks[row].logprobs = std::vector<int>{0, 1, 2, 20, 5, -1}[row];
      asks[row].params.logit_bias = {{static_cast<int32_t>(row % 3), 30.0F}};
    }
    const Samples samples = sample_on_gpu(logits, vocab, vocab, asks);
    for (size_t row = 0; row + 1 < rows; ++row) {
      const SampledToken wanted = sample_on_cpu(logits, vocab, vocab, row, asks[row]).value();
      EXPECT_EQ(samples.tokens[row], wanted.token);
      EXPECT_NEAR(samples.logprobs[row], wanted.logprob, 1e-5);
      for (size_t i = 0; i < wanted.top_logprobs.size(); ++i) {
        const TopLogprob& got = samples.top[row * kMaxTopLogprobs + i];
        EXPECT_EQ(got.token, wanted.top_logprobs[i].token) << "row " << row << " place " << i;
        EXPECT_NEAR(got.logprob, wanted.top_logprobs[i].logprob, 1e-5);
      }
    }
    EXPECT_TRUE(std::isnan(samples.logprobs[rows - 1]));  // not asked for
  }
}

/// About one token in eight may come, and at least one.
std::vector<uint32_t> random_mask(int64_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32));
  for (uint32_t& word : mask) {
    word = static_cast<uint32_t>(random()) & static_cast<uint32_t>(random()) &
           static_cast<uint32_t>(random());
  }
  mask[0] |= 2U;
  return mask;
}

TEST(Sampling, MasksLeaveWhatTheyAllow) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t vocab : {40, 1000, 32001}) {
    const size_t rows = 6;
    const auto logits = random_values(rows * static_cast<size_t>(vocab), 61, 3.0F);
    std::vector<Ask> asks = draws({.temperature = 1.0, .top_k = 30}, rows);
    asks[1].params = {.temperature = 0};
    asks[2].params.top_p = 0.9;
    for (size_t row = 0; row < rows; row += row == 2 ? 2 : 1) {  // row 3 is free
      asks[row].mask = random_mask(vocab, static_cast<uint32_t>(row));
    }
    asks[4].logprobs = 3;  // those of the model, whatever the mask
    asks[5].mask.assign(asks[5].mask.size(), 0);
    asks[5].mask[1] = 4;  // token 34 alone
    const Samples samples = sample_on_gpu(logits, vocab, vocab, asks);
    for (size_t row = 0; row < rows; ++row) {
      const SampledToken wanted = sample_on_cpu(logits, vocab, vocab, row, asks[row]).value();
      EXPECT_EQ(samples.tokens[row], wanted.token) << "vocabulary " << vocab << ", row " << row;
      EXPECT_EQ(samples.status[row], SampleStatus::kOk);
    }
    EXPECT_EQ(samples.tokens[5], 34);
    const SampledToken fourth = sample_on_cpu(logits, vocab, vocab, 4, asks[4]).value();
    EXPECT_NEAR(samples.logprobs[4], fourth.logprob, 1e-5);
    EXPECT_EQ(samples.top[4 * kMaxTopLogprobs].token, fourth.top_logprobs[0].token);
  }
}

TEST(Sampling, RefusesWhatItCannotDo) {
  EXPECT_EQ(sample_tokens({.stride = 10, .rows = 1, .vocab = 11, .max_rows = 1}, {}),
            cudaErrorInvalidValue);
  EXPECT_EQ(sample_tokens({.stride = 11, .rows = 2, .vocab = 11, .max_rows = 1}, {}),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace nibble::cuda
