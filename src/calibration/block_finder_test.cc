#include "calibration/block_finder.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <gmock/gmock.h>

#include "calibration/channel_sizes.h"
#include "calibration/split_parts.h"
#include "calibration/testing/calibration_test_base.h"
#include "calibration/transform_chain.h"
#include "checkpoint/fmpq_sidecar.h"
#include "model/model.h"
#include "model/testing/distance.h"
#include "model/testing/sequence_runner.h"
#include "quantizer/model_files.h"

namespace nibble {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kBlock = 32;

class Blocks : public Calibration {
 protected:
  /// Of 32 channels.
  [[nodiscard]] QuantizeOptions in_blocks(const std::string& model,
                                          const std::string& destination) const {
    QuantizeOptions all = options(model, path(destination), "w4ax_b32");
    all.plan.calibration = Json::object({{"blocks", kBlock}});  // so that it can be planned
    return all;
  }

  static Result<FoundBlocks> find(const QuantizeOptions& options, ChannelMoves moves, int threads) {
    const CheckpointReader reader = CheckpointReader::open(options.source).value();
    NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan,
                            make_plan(reader, read_config(options.source).value(), options.plan));
    const CalibrationText text =
        read_model_text(options.source, load_model_config(options.source).value(),
                        calibration(options.source, Rounding::kRtn).text)
            .value();
    return find_blocks({.model = options.source,
                        .reader = reader,
                        .plan = plan,
                        .windows = text.windows,
                        .moves = moves,
                        .block = kBlock,
                        .act = options.plan.rules.scheme.act,
                        .beside = options.destination,
                        .threads = threads});
  }

  static CalibrationOptions rounding(const QuantizeOptions& options,
                                     const FoundBlocks& found,
                                     double share) {
    CalibrationOptions how = calibration(options.source, Rounding::kGptq);
    how.acts = found.acts(found.ranking.choose(share));
    how.parts = found.parts;
    how.blocks = Json::object({{"block", kBlock}});
    return how;
  }

  /// Logits of some tokens [tokens, vocab].
  static std::vector<float> logits(const std::string& folder) {
    const auto backend = make_cpu_backend({.threads = 2}).value();
    const auto model = load_model(folder, *backend, {.max_batch_tokens = 64}).value();
    std::vector<int32_t> tokens(40);
    std::iota(tokens.begin(), tokens.end(), 3);
    return SequenceRunner(*model, *backend, KvCode::kF32).feed(tokens);
  }
};

TEST_F(Blocks, AreChosenOverTheWholeModelAndAlikeInEachPart) {
  const FoundBlocks found = find(in_blocks(kModel, "out"), ChannelMoves::kNone, 2).value();
  EXPECT_EQ(found.sites.size(), 8U * 4U);
  EXPECT_EQ(found.parts, 4);  // as many as heads
  const BlockChoice choice = found.ranking.choose(0.16);
  EXPECT_LE(choice.outlier_share, 0.16);
  EXPECT_GT(choice.outlier_share, 0.15);
  EXPECT_LT(choice.error, found.ranking.choose(0).error);
  EXPECT_GT(choice.error, found.ranking.choose(1).error);
  const SiteActs acts = found.acts(choice);
  for (int64_t layer = 0; layer < 8; ++layer) {
    for (const Site site : {Site::kOutput, Site::kDown}) {
      const std::vector<uint8_t>& bits = acts.find({layer, site})->blocks->bits;
      const auto part = std::ssize(bits) / found.parts;
      const auto eights = [&](int64_t i) {
        return std::count(bits.begin() + i * part, bits.begin() + (i + 1) * part, 8);
      };
      EXPECT_EQ(eights(0), eights(3)) << layer;
    }
  }
  const FoundBlocks again = find(in_blocks(kModel, "out"), ChannelMoves::kNone, 1).value();
  for (size_t site = 0; site < found.sites.size(); ++site) {
    EXPECT_EQ(found.ranking.sites()[site].costs.low, again.ranking.sites()[site].costs.low);
    EXPECT_EQ(found.ranking.sites()[site].outputs, again.ranking.sites()[site].outputs);
  }
}

TEST_F(Blocks, GatheredChannelsStayInTheirParts) {
  const FoundBlocks found = find(in_blocks(kModel, "out"), ChannelMoves::kGather, 2).value();
  for (const FoundSite& site : found.sites) {
    std::vector<int32_t> sorted = *site.columns;
    EXPECT_FALSE(std::ranges::is_sorted(sorted));
    const auto part = std::ssize(sorted) / (devices_may_split(site.input.site) ? found.parts : 1);
    for (int64_t i = 0; i < std::ssize(sorted); ++i) {
      EXPECT_EQ((*site.columns)[static_cast<size_t>(i)] / part, i / part);
    }
    std::ranges::sort(sorted);
    for (size_t i = 0; i < sorted.size(); ++i) {
      EXPECT_EQ(sorted[i], static_cast<int32_t>(i));
    }
  }
  const FoundBlocks as_it_is = find(in_blocks(kModel, "out"), ChannelMoves::kNone, 2).value();
  EXPECT_LT(found.ranking.choose(0.16).error, as_it_is.ranking.choose(0.16).error);
}

TEST_F(Blocks, FoldedChannelsChangeNothingThatTheModelComputes) {
  const std::string model = dummy("llama3", {{"hidden_size", 64}, {"intermediate_size", 128}});
  const auto folded = make_transformed({.quantize = in_blocks(model, "out"),
                                        .transforms = {Transform::kPermute},
                                        .text = calibration(model, Rounding::kRtn).text,
                                        .blocks = {.block = kBlock}});
  ASSERT_TRUE(folded.ok()) << folded.status().message();
  EXPECT_LT(distance(logits(*folded), logits(model)), 2e-5);
  EXPECT_NE(read_file(*folded + "/model.safetensors").value(),
            read_file(model + "/model.safetensors").value());
}

TEST_F(Blocks, OutputsDependOnNoThreadsAndSayHowTheyAreRead) {
  for (const ChannelMoves moves : {ChannelMoves::kNone, ChannelMoves::kGather}) {
    const bool gather = moves == ChannelMoves::kGather;
    QuantizeOptions one = in_blocks(kModel, gather ? "gathered" : "one");
    const FoundBlocks found = find(one, moves, 2).value();
    const CalibrationOptions how = rounding(one, found, 0.2);
    const auto made = quantize(one, how);
    ASSERT_TRUE(made.ok()) << made.status().message();
    QuantizeOptions other = in_blocks(kModel, gather ? "gathered3" : "three");
    other.threads = 3;
    ASSERT_TRUE(quantize(other, how).ok());
    for (const char* file : {"model.safetensors", "nibble_fmpq.safetensors", "nibble_fmpq.json"}) {
      EXPECT_TRUE(read_file(one.destination + "/" + file).value() ==
                  read_file(other.destination + "/" + file).value())
          << file;
    }
    const CheckpointReader weights = CheckpointReader::open(one.destination).value();
    const auto sidecar = read_fmpq_sidecar(one.destination, weights);
    ASSERT_TRUE(sidecar.ok()) << sidecar.status().message();
    EXPECT_EQ(sidecar->permute, gather ? FmpqPermute::kGather : FmpqPermute::kNone);
    EXPECT_EQ(sidecar->parts, found.parts);
    const FmpqSidecar::Site* site = sidecar->find("model.layers.3.mlp.down_proj");
    ASSERT_NE(site, nullptr);
    EXPECT_EQ(site->precision, *how.acts.find({3, Site::kDown})->blocks);
    EXPECT_THAT(sidecar->find("model.layers.3.mlp.up_proj")->modules,
                ElementsAre("model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj"));
    EXPECT_NEAR(sidecar->share_of_bits(4, weights), 0.8, 0.02);
    const std::string config = read_file(one.destination + "/config.json").value();
    EXPECT_THAT(config, HasSubstr("nibble_fmpq"));
    EXPECT_EQ(config.find(std::string(kFmpqGatherStrategy)) != std::string::npos, gather);
    // Loaded again the model computes what it computed while it was rounded: nearly the source's.
    EXPECT_LT(distance(logits(one.destination), logits(kModel)), 0.5);
  }
}

TEST_F(Blocks, RefusalsNameTheMatrix) {
  QuantizeOptions odd = in_blocks(dummy("llama3", {{"intermediate_size", 176}}), "out");
  odd.plan.rules.scheme = find_scheme("w4ax_class").value();
  const Status uneven = find(odd, ChannelMoves::kNone, 1).status();
  EXPECT_EQ(uneven.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(uneven.message(), HasSubstr("down_proj: its 176 input channels are no multiple"));
  QuantizeOptions large = in_blocks(kModel, "out");
  large.plan.rules.rules = {"*down_proj=w4ax"};
  const Status sizes = find(large, ChannelMoves::kNone, 1).status();
  EXPECT_EQ(sizes.code(), StatusCode::kUnsupported);
  EXPECT_THAT(sizes.message(), HasSubstr("down_proj: has blocks of 128"));
  large.plan.rules.rules = {"*down_proj=w4a8_bf16"};
  EXPECT_THAT(find(large, ChannelMoves::kNone, 1).status().message(),
              HasSubstr("down_proj: has blocks of other precisions (w4a8_bf16)"));
  QuantizeOptions ruled = options(kModel, path("ruled"), "w4a16_g32");
  ruled.plan.rules.rules = {"*down_proj=w4ax_b32"};
  const Status alone = quantize(ruled, calibration(kModel, Rounding::kGptq)).status();
  EXPECT_EQ(alone.code(), StatusCode::kUnsupported);
  EXPECT_THAT(alone.message(), HasSubstr("with --scheme"));
}

/// Sums of FoundSite::rows over the downs of a layer's experts.
double rows_of_downs(const FoundBlocks& found, int64_t layer) {
  double rows = 0;
  for (const FoundSite& site : found.sites) {
    rows += site.input.layer == layer && site.input.site == Site::kExpertDown ? site.rows : 0;
  }
  return rows;
}

// Two layers of six experts, of which a token takes two.
TEST_F(Blocks, OfExpertsUpIsCommonAndEachDownItsOwn) {
  const std::string model = dummy("gpt_oss");
  const FoundBlocks found = find(in_blocks(model, "out"), ChannelMoves::kGather, 2).value();
  ASSERT_EQ(found.sites.size(), 2U * (1U + 6U));  // of this family experts alone are worth it
  for (const int64_t layer : {0, 1}) {
    EXPECT_NEAR(rows_of_downs(found, layer), 2, 1e-12);
  }
  std::set<std::vector<int32_t>> orders;
  for (const FoundSite& site : found.sites) {
    if (site.input.site == Site::kExpertUp) {
      EXPECT_NEAR(site.rows, 2.0 / 6, 1e-12);
      EXPECT_EQ(site.columns->size(), 64U);
    } else if (site.input.site == Site::kExpertDown && site.rows > 0) {
      ASSERT_EQ(site.columns->size(), 96U);
      orders.insert(*site.columns);
    }
  }
  EXPECT_GT(orders.size(), 6U);
  const SiteActs acts = found.acts(found.ranking.choose(0.3));
  EXPECT_EQ(acts.find({1, Site::kExpertUp, 5}), acts.find({1, Site::kExpertUp, 0}));
  EXPECT_NE(acts.find({1, Site::kExpertDown, 5}), acts.find({1, Site::kExpertDown, 0}));
}

TEST_F(Blocks, OfExpertsAreWrittenAndReadAgain) {
  for (const char* family : {"gpt_oss", "qwen2_moe"}) {
    const std::string model =
        dummy(family, {{"moe_intermediate_size", 96}, {"shared_expert_intermediate_size", 64}});
    for (const ChannelMoves moves : {ChannelMoves::kNone, ChannelMoves::kGather}) {
      for (const char* scheme : {"w4ax_b32", "w4ax_class", "w4a8_bf16"}) {
        SCOPED_TRACE(fmt::format("{} {} {}", family, scheme, static_cast<int>(moves)));
        QuantizeOptions wanted = in_blocks(model, "out");
        wanted.plan.rules.scheme = find_scheme(scheme).value();
        wanted.existing = ExistingOutput::kReplace;
        const auto found = find(wanted, moves, 2);
        ASSERT_TRUE(found.ok()) << found.status().message();
        const CalibrationOptions how = rounding(wanted, *found, 0.3);
        const auto made = quantize(wanted, how);
        ASSERT_TRUE(made.ok()) << made.status().message();
        const std::string bytes = weights("out");
        const CheckpointReader reader = CheckpointReader::open(path("out")).value();
        const auto sidecar = read_fmpq_sidecar(path("out"), reader);
        ASSERT_TRUE(sidecar.ok()) << sidecar.status().message();
        const uint8_t more = 2 * low_bits(sidecar->scales);
        EXPECT_NEAR(sidecar->share_of_bits(more, reader), found->ranking.choose(0.3).outlier_share,
                    1e-9);
        const double near = distance(logits(path("out")), logits(model));
        EXPECT_LT(near, 0.8);
        EXPECT_GT(near, 0.01);
        wanted.threads = 3;
        ASSERT_TRUE(quantize(wanted, how).ok());
        EXPECT_TRUE(weights("out") == bytes) << "bytes depend on threads";
      }
    }
  }
}

// Latent attention is run as it is, and folds into the order of the stream.
TEST_F(Blocks, OfExpertsBesideLatentAttention) {
  const std::string model = dummy("deepseek_v3", {{"moe_intermediate_size", 64}});
  QuantizeOptions wanted = in_blocks(model, "out");
  const auto folded = make_transformed({.quantize = wanted,
                                        .transforms = {Transform::kPermute},
                                        .text = calibration(model, Rounding::kRtn).text,
                                        .blocks = {.block = kBlock}});
  ASSERT_TRUE(folded.ok()) << folded.status().message();
  EXPECT_LT(distance(logits(*folded), logits(model)), 2e-5);
  const auto found = find(wanted, ChannelMoves::kNone, 2);
  ASSERT_TRUE(found.ok()) << found.status().message();
  for (const Rounding how : {Rounding::kGptq, Rounding::kGptaq}) {
    CalibrationOptions options = rounding(wanted, *found, 0.3);
    options.rounding = how;
    wanted.existing = ExistingOutput::kReplace;
    const auto made = quantize(wanted, options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    EXPECT_LT(distance(logits(path("out")), logits(model)), 0.8);
  }
  wanted.plan.rules.include = {"*kv_b_proj"};
  const Status refused = quantize(wanted, rounding(wanted, *found, 0.3)).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_THAT(refused.message(), HasSubstr("kv_b_proj"));
  EXPECT_THAT(refused.message(), HasSubstr("latent attention"));
}

TEST_F(Blocks, OfExpertsWithoutRowsHave8Bits) {
  const std::string model = dummy("gpt_oss");
  const QuantizeOptions wanted = in_blocks(model, "out");
  const CheckpointReader reader = CheckpointReader::open(model).value();
  const QuantizePlan plan = make_plan(reader, read_config(model).value(), wanted.plan).value();
  const std::vector<std::vector<int32_t>> windows = {{5}};  // two experts of a layer see it
  const FoundBlocks found = find_blocks({.model = model,
                                         .reader = reader,
                                         .plan = plan,
                                         .windows = windows,
                                         .moves = ChannelMoves::kGather,
                                         .block = kBlock,
                                         .beside = wanted.destination})
                                .value();
  const BlockChoice choice = found.ranking.choose(0);
  int without = 0;
  for (size_t i = 0; i < found.sites.size(); ++i) {
    const bool none = found.sites[i].rows == 0;
    without += none ? 1 : 0;
    EXPECT_EQ(found.sites[i].columns == nullptr, none);
    EXPECT_THAT(choice.sites[i].bits, testing::Each(none ? 8 : 4));
  }
  EXPECT_EQ(without, 2 * 4);
  EXPECT_EQ(choice.outlier_share, 0);
  EXPECT_GT(found.ranking.least_share(), 0);
}

TEST(ChannelSizes, OrderOfEachPartIsByItself) {
  EXPECT_THAT(order_by_size({1, 3, 3, 2, 9, 4}, 1), ElementsAre(4, 5, 1, 2, 3, 0));
  EXPECT_THAT(order_by_size({1, 3, 3, 2, 9, 4}, 2), ElementsAre(1, 2, 0, 4, 5, 3));
  ChannelSizes squares(OrderKey::kMeanSquare);
  ChannelSizes largest(OrderKey::kLargest);
  const std::vector<float> rows = {1, -2, 3, 0.5F};
  squares.add(rows.data(), 2, 2);
  largest.add(rows.data(), 2, 2);
  EXPECT_THAT(squares.all(), ElementsAre(10, 4.25));
  EXPECT_THAT(largest.all(), ElementsAre(3, 2));
}

TEST(SplitParts, EndWithBlocksAndHeads) {
  ModelConfig config;
  config.num_heads = 32;
  config.head_dim = 128;
  config.intermediate_size = 14336;
  EXPECT_EQ(split_parts(config, 128), 8);
  config.num_heads = 9;
  config.head_dim = 64;
  config.intermediate_size = 1536;
  EXPECT_EQ(split_parts(config, 32), 1);
  config.num_heads = 12;
  EXPECT_EQ(split_parts(config, 64), 4);
}

}  // namespace
}  // namespace nibble
