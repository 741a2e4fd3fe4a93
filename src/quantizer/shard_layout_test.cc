#include "quantizer/shard_layout.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "checkpoint/safetensors.h"
#include "quantizer/plan_config.h"

namespace nibble {
namespace {

PlannedTensor tensor(std::string name, DType dtype, std::vector<int64_t> shape) {
  return {{std::move(name), dtype, std::move(shape), 0}, 0};
}

TEST(LayoutShards, PlacesAreThoseOfTheHeader) {
  std::vector<PlannedTensor> first = {tensor("z", DType::kU8, {3}), tensor("b", DType::kF32, {2})};
  std::vector<PlannedTensor> second = {tensor("a", DType::kF32, {4}),
                                       tensor("e", DType::kF32, {0})};
  const auto shards = layout_shards({&first, &second}, 1000).value();
  ASSERT_EQ(shards.size(), 1U);
  EXPECT_EQ(shards[0].name, "model.safetensors");
  const std::string header = shard_header({&first[0], &first[1], &second[0], &second[1]});
  std::string file = header;
  file.resize(static_cast<size_t>(shards[0].file_bytes));
  const auto content =
      parse_safetensors(std::as_bytes(std::span(file.data(), file.size())), "file").value();
  ASSERT_EQ(content.tensors.size(), 4U);
  for (const std::vector<PlannedTensor>* job : {&first, &second}) {
    for (const PlannedTensor& planned : *job) {
      const auto found =
          std::find_if(content.tensors.begin(), content.tensors.end(),
                       [&](const TensorInfo& info) { return info.name == planned.tensor.name; });
      ASSERT_NE(found, content.tensors.end());
      if (!found->data.empty()) {
        EXPECT_EQ(reinterpret_cast<const char*>(found->data.data()) - file.data(), planned.offset);
      }
      EXPECT_EQ(static_cast<int64_t>(found->data.size()), planned.tensor.bytes);
    }
  }
}

TEST(LayoutShards, FillsFilesInOrderAndKeepsJobsWhole) {
  std::vector<std::vector<PlannedTensor>> jobs;
  for (const int64_t bytes : {40, 40, 30, 200, 10}) {
    jobs.push_back({tensor("t" + std::to_string(jobs.size()), DType::kU8, {bytes})});
  }
  std::vector<std::vector<PlannedTensor>*> pointers;
  for (auto& job : jobs) {
    pointers.push_back(&job);
  }
  const auto shards = layout_shards(pointers, 100).value();
  ASSERT_EQ(shards.size(), 4U);
  EXPECT_EQ(shards[0].jobs, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(shards[1].jobs, (std::vector<size_t>{2}));
  EXPECT_EQ(shards[2].jobs, (std::vector<size_t>{3}));
  EXPECT_EQ(shards[3].name, "model-00004-of-00004.safetensors");
  jobs[4][0].tensor.name = "t0";
  EXPECT_EQ(layout_shards(pointers, 100).status().code(), StatusCode::kInvalidArgument);
}

TEST(ShardsOfPart, ShareOutEverythingOnceAndEvenly) {
  std::vector<int64_t> weights(97);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = 50 + static_cast<int64_t>(i * 37 % 60);
  }
  for (const int parts : {1, 2, 7, 97, 200}) {
    std::vector<int> owners(weights.size());
    int64_t most = 0;
    for (int part = 1; part <= parts; ++part) {
      int64_t load = 0;
      for (const size_t shard : shards_of_part(weights, part, parts)) {
        ++owners[shard];
        load += weights[shard];
      }
      most = std::max(most, load);
    }
    EXPECT_EQ(owners, std::vector<int>(weights.size(), 1)) << parts;
    const int64_t total = std::accumulate(weights.begin(), weights.end(), int64_t{0});
    EXPECT_LE(most, total / parts + 110) << parts;
  }
}

TEST(ModulePatterns, AreShortAndMatchNothingElse) {
  const std::vector<std::string> experts = {"m.0.experts.0.up", "m.0.experts.1.up",
                                            "m.1.experts.0.up"};
  EXPECT_EQ(module_patterns(experts, {"m.0.attn.q"}),
            (std::vector<std::string>{"re:m\\.\\d+\\.experts\\.\\d+\\.up$"}));
  EXPECT_EQ(module_patterns({"m.0.up", "head"}, {"m.1.up"}),
            (std::vector<std::string>{"m.0.up", "re:head$"}));
}

}  // namespace
}  // namespace nibble
