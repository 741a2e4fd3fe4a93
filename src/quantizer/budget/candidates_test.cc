#include "quantizer/budget/candidates.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "checkpoint/checkpoint_reader.h"
#include "quantizer/algorithms/nearest.h"
#include "quantizer/model_files.h"
#include "quantizer/quantize.h"

namespace nibble {
namespace {

using testing::HasSubstr;

constexpr const char* kModel = "models/storyteller";

/// A model's matrices, with what they read.
struct Opened {
  CheckpointReader reader;
  Json config;
  SourceModel source;

  static Opened of(const std::string& folder) {
    CheckpointReader reader = CheckpointReader::open(folder).value();
    Json config = read_config(folder).value();
    SourceModel source = list_source_matrices(reader, config).value();
    return {std::move(reader), std::move(config), std::move(source)};
  }
};

TEST(Candidates, AreTheMatricesOfTheLayersTiedAsLoadersFuseThem) {
  const Opened model = Opened::of(kModel);
  const auto choices = parse_scheme_choices({"keep", "w4a16_g32"}).value();
  const auto candidates = list_candidates(model.source, model.config, choices).value();
  ASSERT_EQ(candidates.size(), 56U);
  std::map<std::string, std::vector<std::string>> ties;
  for (const Candidate& candidate : candidates) {
    ties[candidate.tied].push_back(candidate.kind);
    EXPECT_FALSE(candidate.experts());
    EXPECT_THAT(candidate.name, HasSubstr("layers." + std::to_string(candidate.layer) + "."));
  }
  EXPECT_EQ(ties.size(), 32U);
  EXPECT_THAT(ties["q/k/v of model.layers.3.self_attn"],
              testing::UnorderedElementsAre("q_proj", "k_proj", "v_proj"));
}

TEST(Candidates, SizesAreThoseOfThePlan) {
  const Opened model = Opened::of(kModel);
  for (const char* name :
       {"w4a16_g32", "w4a16_g128_asym", "w8a8_int8", "w8a8_fp8_block", "mxfp4"}) {
    const auto choices = parse_scheme_choices({name}).value();
    PlanOptions options;
    options.rules.scheme = *choices[0].scheme;
    options.dialect = Dialect::kCompressedTensors;
    const auto plan = make_plan(model.reader, model.config, options);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    std::map<std::string, int64_t> bytes;
    for (const PlanJob& job : plan->jobs) {
      bytes[job.name()] = job.bytes_out();
    }
    for (const Candidate& candidate :
         list_candidates(model.source, model.config, choices).value()) {
      const auto size = stored_size(candidate, choices[0], Dialect::kCompressedTensors);
      ASSERT_TRUE(size.ok()) << size.status().message();
      EXPECT_EQ(size->bytes, bytes[candidate.name]) << name << " " << candidate.name;
    }
  }
  const Candidate kept =
      list_candidates(model.source, model.config, parse_scheme_choices({"w4a8"}).value())
          .value()[0];
  EXPECT_EQ(stored_size(kept, {}, Dialect::kCompressedTensors)->bytes, 2 * kept.weights());
}

TEST(Candidates, SchemesThatNoFolderHoldsTogetherAreNamed) {
  const auto all = parse_scheme_choices({"w4a8", "w4a16_g32", "w8a8_fp8_block"}).value();
  EXPECT_EQ(common_dialect(all, std::nullopt).value(), Dialect::kCompressedTensors);
  EXPECT_EQ(common_dialect({all[0]}, std::nullopt).value(), Dialect::kQuark);
  const auto refused = common_dialect(all, Dialect::kQuark);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(refused.status().message(), HasSubstr("w4a16_g32, w8a8_fp8_block"));
  EXPECT_THAT(parse_scheme_choices({"w4a8", "w4a8"}).status().message(), HasSubstr("twice"));
  EXPECT_THAT(parse_scheme_choices({"keep"}).status().message(), HasSubstr("no scheme"));
  EXPECT_THAT(parse_scheme_choices({"bf16"}).status().message(), HasSubstr("quantizes nothing"));
  EXPECT_FALSE(parse_scheme_choices({"w5a5"}).ok());
}

// What the codes mean is what a reader of the written folder finds.
TEST(NearestCodes, AreThoseThatAreStored) {
  const Opened model = Opened::of(kModel);
  const std::string folder =
      (std::filesystem::path(testing::TempDir()) / ("nearest-" + std::to_string(getpid())))
          .string();
  ThreadPool pool(2);
  for (const QuantScheme& scheme : all_schemes()) {
    if (!scheme.weight.quantized() || scheme.weight.scale_per == ScalePer::kTensor ||
        in_blocks(scheme.act)) {
      continue;  // fused matrices share a scale, and each has one of its own here; or calibrated
    }
    QuantizeOptions options;
    options.source = kModel;
    options.destination = folder;
    options.plan.rules.scheme = scheme;
    options.plan.dialect = Dialect::kCompressedTensors;
    options.existing = ExistingOutput::kReplace;
    options.threads = 2;
    ASSERT_TRUE(quantize_checkpoint(options).ok());
    const Opened stored = Opened::of(folder);
    int compared = 0;
    for (const auto& matrix : model.source.matrices) {
      const auto same = std::ranges::find_if(stored.source.matrices, [&](const auto& other) {
        return other->module() == matrix->module();
      });
      if (!matrix->module().ends_with("_proj") || compared == 9) {
        continue;
      }
      ++compared;
      const PlainMatrix plain = read_matrix(*matrix).value();
      const QuantTensor codes =
          nearest_codes(plain, scheme, Dialect::kCompressedTensors, pool).value();
      std::vector<float> ours(plain.w.size());
      std::vector<float> theirs(plain.w.size());
      decode_rows(codes, ours.data(), pool);
      ASSERT_TRUE((*same)->decode(0, plain.n, theirs.data()).ok());
      EXPECT_EQ(ours, theirs) << scheme.name << " " << matrix->module();
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace nibble
