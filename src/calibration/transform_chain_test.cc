#include "calibration/transform_chain.h"

#include <filesystem>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"
#include "calibration/calibrator.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kModel = "models/storyteller";

class Chains : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) / fmt::format("chains_{}", ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] QuantizeOptions options(const std::string& name,
                                        std::string_view scheme,
                                        int threads) const {
    QuantizeOptions options;
    options.source = kModel;
    options.destination = (root_ / name).string();
    options.plan.rules.scheme = find_scheme(scheme).value();
    options.threads = threads;
    return options;
  }

  static CalibrationTextOptions text() {
    return {.path = "tests/data/text/the_black_cat.txt", .windows = 4, .length = 100};
  }

  /// Bytes of the output's weights.
  static std::string quantized(QuantizeOptions options, const Method& method) {
    const ChainOptions chain{
        .quantize = options, .transforms = method.transforms, .text = text(), .seed = 2};
    const auto model = make_transformed(chain);
    EXPECT_TRUE(model.ok()) << model.status().message();
    QuantizeOptions last = options;
    last.source = *model;
    const auto maker = make_calibrator({.model = *model,
                                        .text = text(),
                                        .rounding = method.rounding,
                                        .transforms = method.transforms})
                           .value();
    last.maker = maker.get();
    const auto report = quantize_checkpoint(last);
    EXPECT_TRUE(report.ok()) << report.status().message();
    return read_file(options.destination + "/model.safetensors").value();
  }

  fs::path root_;
};

TEST_F(Chains, BytesDependNeitherOnThreadsNorOnAnEarlierRun) {
  const Method method = parse_method("rotate,smooth,gptq").value();
  const std::string one = quantized(options("one", "w4a8", 1), method);
  EXPECT_TRUE(one == quantized(options("three", "w4a8", 3), method));
  EXPECT_TRUE(fs::exists(root_ / "one.transformed-2"));
  EXPECT_FALSE(fs::exists(root_ / "one.transformed-1"));  // only the last is needed
  fs::remove_all(root_ / "one");
  EXPECT_TRUE(one == quantized(options("one", "w4a8", 2), method));  // takes what is there
  remove_transformed((root_ / "one").string());
  EXPECT_FALSE(fs::exists(root_ / "one.transformed-2"));
  EXPECT_TRUE(fs::exists(root_ / "one"));
}

TEST_F(Chains, OfOrdersAndTurnsDependNotOnThreadsEither) {
  const Method method = parse_method("rotate,turn,permute,smooth,gptq").value();
  const std::string one = quantized(options("one", "w4a16_g128", 1), method);
  EXPECT_TRUE(one == quantized(options("three", "w4a16_g128", 3), method));
  EXPECT_THAT(read_file((root_ / "one/config.json").string()).value(),
              HasSubstr("\"transform_config\""));
}

// The folder in between is read as any other: only once is it turned.
TEST_F(Chains, AModelIsTurnedOnce) {
  QuantizeOptions wanted = options("out", "w4a8", 2);
  wanted.source =
      make_transformed({.quantize = wanted, .transforms = {Transform::kTurn}, .text = text()})
          .value();
  wanted.destination = (root_ / "again").string();
  const auto again =
      make_transformed({.quantize = wanted, .transforms = {Transform::kTurn}, .text = text()});
  EXPECT_EQ(again.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(again.status().message(), HasSubstr("transform_config"));
}

TEST_F(Chains, StopWhenTheyAreTold) {
  const std::atomic<bool> stop = true;
  QuantizeOptions wanted = options("out", "w4a16_g32", 2);
  wanted.stop = &stop;
  for (const Transform transform :
       {Transform::kRotate, Transform::kSmooth, Transform::kPermute, Transform::kTurn}) {
    const auto model =
        make_transformed({.quantize = wanted, .transforms = {transform}, .text = text()});
    EXPECT_EQ(model.status().code(), StatusCode::kCancelled);
  }
  for (const auto& entry : fs::directory_iterator(root_)) {
    ADD_FAILURE() << entry.path() << " was left";
  }
}

}  // namespace
}  // namespace nibble
