#include "model/fmpq_inputs.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/fmpq_sidecar.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int64_t kRows = 3;
constexpr int64_t kInputs = 128;
constexpr WeightFormat kWeights{WeightCode::kInt4, ScalePer::kGroup, 32, DType::kBF16};

class FmpqInputsTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            fmt::format("{}_{}", testing::UnitTest::GetInstance()->current_test_info()->name(),
                        ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_);
    const std::vector<TensorPlan> plan = {{"a.weight_packed", DType::kI32, {kRows, kInputs / 8}},
                                          {"a.weight_scale", DType::kBF16, {kRows, kInputs / 32}}};
    auto writer = CheckpointWriter::create(root_.string(), plan, 1 << 20).value();
    for (const TensorPlan& tensor : plan) {
      const auto bytes = static_cast<size_t>(tensor_bytes(tensor.dtype, tensor.shape).value());
      ASSERT_TRUE(writer.write(tensor.name, std::vector<std::byte>(bytes, std::byte{1})).ok());
    }
    ASSERT_TRUE(writer.finish().ok());
    FmpqSidecar sidecar;
    sidecar.block = 32;
    sidecar.permute = FmpqPermute::kGather;
    sidecar.sites.resize(1);
    sidecar.sites[0].modules = {"a"};
    sidecar.sites[0].precision = {.block = 32, .bits = {4, 8, 4, 4}};
    for (int32_t i = 0; i < kInputs; ++i) {
      sidecar.sites[0].columns.push_back(kInputs - 1 - i);
    }
    ASSERT_TRUE(write_fmpq_sidecar(sidecar, reader(), root_.string()).ok());
    announce(fmpq_config_json(sidecar));
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] CheckpointReader reader() const {
    return CheckpointReader::open(root_.string()).value();
  }
  void announce(const Json& field) const {
    std::ofstream(root_ / "config.json")
        << Json::object({{std::string(kFmpqConfigField), field}}).dump();
  }

  static MappedLinear weights(const WeightFormat& format, int64_t k) {
    MappedLinear linear;
    linear.weight.format = format;
    linear.weight.n = kRows;
    linear.weight.k = k;
    return linear;
  }

  static QuantConfig gathered() {
    QuantConfig config;
    config.groups.resize(1);
    config.groups[0].activations.gathered = true;
    config.groups[0].activations.where = "config.json: group";
    return config;
  }

  fs::path root_;
};

TEST_F(FmpqInputsTest, GivesModulesTheirSite) {
  const auto inputs = FmpqInputs::open(reader(), gathered(), FmpqUse::kApplied).value();
  MappedLinear linear = weights(kWeights, kInputs);
  ASSERT_TRUE(inputs.apply("a", linear).ok());
  EXPECT_EQ(linear.act.format, ActFormat::kIntBlocks);
  ASSERT_NE(linear.act.blocks, nullptr);
  EXPECT_EQ(linear.act.blocks->bits, (std::vector<uint8_t>{4, 8, 4, 4}));
  ASSERT_NE(linear.act.columns, nullptr);
  EXPECT_EQ(linear.act.columns->front(), kInputs - 1);
  MappedLinear other = weights(kWeights, kInputs);
  ASSERT_TRUE(inputs.apply("b", other).ok());
  EXPECT_EQ(other.act, ActSpec());
}

TEST_F(FmpqInputsTest, IgnoredGathersAllTheSame) {
  const auto inputs = FmpqInputs::open(reader(), gathered(), FmpqUse::kIgnored).value();
  MappedLinear linear = weights(kWeights, kInputs);
  ASSERT_TRUE(inputs.apply("a", linear).ok());
  EXPECT_EQ(linear.act.format, ActFormat::kFloat);
  EXPECT_EQ(linear.act.blocks, nullptr);
  EXPECT_NE(linear.act.columns, nullptr);
}

TEST_F(FmpqInputsTest, IgnoredOrNotAnnouncedNothingIsRead) {
  fs::remove(root_ / std::string(kFmpqSidecarName));
  EXPECT_TRUE(FmpqInputs::open(reader(), {}, FmpqUse::kIgnored).ok());
  EXPECT_EQ(FmpqInputs::open(reader(), {}, FmpqUse::kApplied).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(FmpqInputs::open(reader(), gathered(), FmpqUse::kIgnored).status().code(),
            StatusCode::kNotFound);
  announce(Json());
  EXPECT_TRUE(FmpqInputs::open(reader(), {}, FmpqUse::kApplied).ok());
  EXPECT_THAT(FmpqInputs::open(reader(), gathered(), FmpqUse::kApplied).status().message(),
              HasSubstr("field nibble_fmpq is missing, but config.json: group"));
}

// Columns in another order mean other products, which nothing later would tell.
TEST_F(FmpqInputsTest, BothFilesMustSayWhetherInputsAreGathered) {
  EXPECT_THAT(FmpqInputs::open(reader(), {}, FmpqUse::kApplied).status().message(),
              HasSubstr("field permute: says that inputs are gathered, but config.json"));
  FmpqSidecar folded = read_fmpq_sidecar(root_.string(), reader()).value();
  folded.permute = FmpqPermute::kFold;
  folded.sites[0].columns.clear();
  ASSERT_TRUE(write_fmpq_sidecar(folded, reader(), root_.string()).ok());
  EXPECT_TRUE(FmpqInputs::open(reader(), {}, FmpqUse::kApplied).ok());
  for (const FmpqUse use : {FmpqUse::kApplied, FmpqUse::kIgnored}) {
    EXPECT_THAT(FmpqInputs::open(reader(), gathered(), use).status().message(),
                HasSubstr("not gathered, but config.json: group says that they are;"));
  }
}

TEST_F(FmpqInputsTest, RefusesOtherWeights) {
  const auto inputs = FmpqInputs::open(reader(), gathered(), FmpqUse::kApplied).value();
  const auto message = [&](MappedLinear&& linear) {
    return std::string(inputs.apply("a", linear).message());
  };
  WeightFormat groups = kWeights;
  groups.group_size = 64;
  EXPECT_THAT(message(weights(groups, kInputs)), HasSubstr("32 beside weights in groups of 64"));
  EXPECT_THAT(message(weights(kWeights, 160)), HasSubstr("has 4 blocks, but 160 input channels"));
  EXPECT_THAT(message(weights(kWeights, 150)), HasSubstr("no multiple of 32"));
  MappedLinear rounded = weights(kWeights, kInputs);
  rounded.act = ActFormat::kInt8Token;
  EXPECT_THAT(message(std::move(rounded)),
              HasSubstr("not plain INT4 with activations as they are"));
  EXPECT_THAT(message(weights({WeightCode::kInt8, ScalePer::kChannel}, kInputs)),
              HasSubstr("not plain INT4"));
}

}  // namespace
}  // namespace nibble
