#include "engine/step_sizes.h"

#include <gtest/gtest.h>

#include "engine/engine_core.h"
#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

TEST(StepSizes, EveryPreferenceHasAName) {
  EXPECT_EQ(preference_names(), (std::vector<std::string>{"ttft", "tpot", "throughput"}));
  for (const std::string& name : preference_names()) {
    EXPECT_EQ(preference_name(parse_preference(name).value()), name);
  }
  const Status unknown = parse_preference("latency").status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.message().find("ttft, tpot, throughput"), std::string::npos);
}

TEST(StepSizes, AreHalvedDownToThoseOfCpus) {
  StepSizes sizes = preferred_sizes(Preference::kThroughput, StepDevice::kGpu);
  std::vector<int64_t> seqs;
  std::vector<int64_t> tokens;
  do {
    seqs.push_back(sizes.max_num_seqs);
    tokens.push_back(sizes.max_num_batched_tokens);
  } while (halve(sizes));
  EXPECT_EQ(tokens, (std::vector<int64_t>{16384, 8192, 4096, 2048, 1024, 512, 512, 512, 512}));
  EXPECT_EQ(seqs, (std::vector<int64_t>{512, 512, 512, 512, 512, 512, 256, 128, 64}));
}

TEST(StepSizes, FillWhatOptionsLeaveOpen) {
  const FakeModel model;
  const auto resolve = [&](const EngineOptions& options) {
    return EngineCore::resolve(options, model.config()).value();
  };
  EXPECT_EQ(resolve({}).max_num_seqs, 64);
  EXPECT_EQ(resolve({}).max_num_batched_tokens, 512);
  EXPECT_EQ(resolve({}).max_mixed_prefill, 512);
  EXPECT_EQ(resolve({.max_num_batched_tokens = 2000}).max_mixed_prefill, 2000);
  EXPECT_EQ(resolve({.prefer = Preference::kTpot}).max_mixed_prefill, 64);
  EXPECT_EQ(resolve({.prefer = Preference::kThroughput}).max_num_batched_tokens, 2048);
  const EngineOptions own = resolve({.max_num_seqs = 3,
                                     .max_num_batched_tokens = 20,
                                     .max_mixed_prefill = 5,
                                     .prefer = Preference::kThroughput});
  EXPECT_EQ(own.max_num_seqs, 3);
  EXPECT_EQ(own.max_num_batched_tokens, 20);
  EXPECT_EQ(own.max_mixed_prefill, 5);
}

}  // namespace
}  // namespace nibble
