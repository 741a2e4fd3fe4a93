#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"
#include "calibration/calibrator.h"
#include "quantizer/quantize.h"
#include "synthetic/dummy.h"

namespace nibble {

namespace fs = std::filesystem;

inline constexpr const char* kModel = "models/storyteller";
inline constexpr const char* kText = "tests/data/text/the_black_cat.txt";

/// Outputs of calibrations in a folder of the test.
class Calibration : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::ranges::replace(name, '/', '_');
    root_ = fs::path(testing::TempDir()) / fmt::format("calibration_{}_{}", name, ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] std::string path(const std::string& name) const { return (root_ / name).string(); }

  static QuantizeOptions options(const std::string& source,
                                 const std::string& destination,
                                 std::string_view scheme) {
    QuantizeOptions options;
    options.source = source;
    options.destination = destination;
    options.plan.rules.scheme = find_scheme(scheme).value();
    options.threads = 2;
    return options;
  }

  static CalibrationOptions calibration(const std::string& model, Rounding rounding) {
    return {
        .model = model, .text = {.path = kText, .windows = 4, .length = 100}, .rounding = rounding};
  }

  /// Bytes of the one weight file of an output.
  [[nodiscard]] std::string weights(const std::string& name) const {
    return read_file(path(name) + "/model.safetensors").value();
  }

  static Result<QuantizeReport> quantize(QuantizeOptions options, const CalibrationOptions& how) {
    NIBBLE_ASSIGN_OR_RETURN(const auto maker, make_calibrator(how));
    options.maker = maker.get();
    return quantize_checkpoint(options);
  }

  /// A random model of a family in tests/golden, with a tokenizer of bytes.
  ///   more  further fields of its config.json
  [[nodiscard]] std::string dummy(
      const std::string& family, const std::vector<std::pair<std::string, Json>>& more = {}) const {
    std::string model = path(family);
    Json config = Json::parse(read_file("tests/golden/" + family + "/config.json").value()).value();
    config.set("vocab_size", 300);
    for (const auto& [key, value] : more) {
      config.set(key, value);
    }
    std::ofstream(path("config.json")) << config.dump();
    const auto made = make_dummy_checkpoint({.config = path("config.json"), .destination = model});
    EXPECT_TRUE(made.ok()) << made.status().message();
    return model;
  }

  fs::path root_;
};

}  // namespace nibble
