#include "checkpoint/kv_sidecar.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr KvSidecarShape kShape{.layers = 2, .kv_heads = 2, .head_dim = 3};

class KvSidecarFile : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            fmt::format("{}_{}", testing::UnitTest::GetInstance()->current_test_info()->name(),
                        ::getpid());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] std::string path() const { return kv_sidecar_path(root_.string()); }

  /// A good one, whose text is then changed.
  [[nodiscard]] Status read_changed(const std::string& from, const std::string& to) const {
    EXPECT_TRUE(write_kv_sidecar(sidecar(), kShape, path()).ok());
    std::string text = read_file(path()).value();
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    std::ofstream(path()) << text;
    return read_kv_sidecar(path(), kShape).status();
  }

  inline static const std::vector<float> kSteps = {0.5F, 0, 0.375F, 1e-3F, 7, 8};

  static KvSidecar sidecar() {
    KvSidecar out;
    out.layers.resize(2);
    out.layers[0].keys = {.form = {.centred = true, .turned = true},
                          .mean = {0.1F, -3.5F, 1e-30F, 16777216.0F, -0.0F, 1.0F / 3.0F},
                          .errors = {0.5, 0.25, -1, 0.125}};
    out.layers[0].values = {.form = {.turned = true}};
    out.layers[1].keys = {.form = {}, .mean = {1, 2, 3, 4, 5, 6}};
    out.layers[1].values = {.form = {.centred = true}, .mean = {6, 5, 4, 3, 2, 1}};
    out.layers[0].keys.page_form = HeadForm{.turned = true};
    out.layers[1].keys.ranges = {.turned = true, .mean = {1, 2, 3, 4, 5, 6.25F}, .step = kSteps};
    out.layers[1].values.ranges = {.step = kSteps};
    out.calibration = Json::object({{"tokens", 7}});
    out.weights = "0123";
    return out;
  }

  fs::path root_;
};

TEST_F(KvSidecarFile, IsReadAsItWasWritten) {
  ASSERT_TRUE(write_kv_sidecar(sidecar(), kShape, path()).ok());
  ASSERT_TRUE(write_kv_sidecar(sidecar(), kShape, path()).ok());  // replaces it
  const auto read = read_kv_sidecar(path(), kShape);
  ASSERT_TRUE(read.ok()) << read.status().message();
  const KvSidecar written = sidecar();
  for (size_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(read->layers[layer].keys.form, written.layers[layer].keys.form);
    EXPECT_EQ(read->layers[layer].keys.mean, written.layers[layer].keys.mean);
    EXPECT_EQ(read->layers[layer].values.form, written.layers[layer].values.form);
    EXPECT_EQ(read->layers[layer].values.mean, written.layers[layer].values.mean);
    EXPECT_EQ(read->layers[layer].keys.page_form, written.layers[layer].keys.page_form);
    for (const auto half : {&KvSidecar::Layer::keys, &KvSidecar::Layer::values}) {
      const auto& ranges = (read->layers[layer].*half).ranges;
      const auto& wanted = (written.layers[layer].*half).ranges;
      ASSERT_EQ(ranges.has_value(), wanted.has_value());
      if (ranges) {
        EXPECT_EQ(ranges->turned, wanted->turned);
        EXPECT_EQ(ranges->mean, wanted->mean);
        EXPECT_EQ(ranges->step, wanted->step);
      }
    }
  }
  EXPECT_FALSE(has_ranges(*read));  // the first layer has none
  EXPECT_EQ(read->calibration.find("tokens")->as_int(), 7);
  EXPECT_EQ(read->weights, "0123");
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1);  // no temporary file stays
  EXPECT_EQ(describe(*read),
            "keys plain in 1 layer, centred+turned in 1; values centred in 1 layer, turned in 1");
}

TEST_F(KvSidecarFile, IsRefusedByFileAndField) {
  const auto refused = [&](const std::string& from, const std::string& to, const char* words) {
    const Status status = read_changed(from, to);
    EXPECT_FALSE(status.ok()) << to;
    EXPECT_THAT(status.message(), HasSubstr("nibble_kv.json"));
    EXPECT_THAT(status.message(), HasSubstr(words));
    EXPECT_THAT(status.message(), HasSubstr("; make it again with nibble calibrate-kv, or remove"));
    return status.code();
  };
  EXPECT_EQ(refused("\"nibble_kv\":1", "\"nibble_kv\":2", "field nibble_kv: is version 2, not 1"),
            StatusCode::kUnsupported);
  EXPECT_EQ(refused("\"nibble_kv\":1", "\"other\":1", "field \"nibble_kv\" is missing"),
            StatusCode::kCorrupt);
  refused("\"kv_heads\":2", "\"kv_heads\":3", "field kv_heads: is 3, but 2");
  refused("\"head_dim\":3", "\"head_dim\":64", "field head_dim: is 64, but 3");
  refused("\"layers\":", "\"rows\":", "field layers: is missing");
  refused("\"keys\":", "\"key\":", "layers[0]: field keys: is missing");
  refused("\"centred+turned\"", "\"rotated\"", "layers[0]: keys: field form: \"rotated\"");
  refused("0.1,", "", "layers[0]: keys: field mean: has 5 numbers");
  refused("0.1,", "\"0.1\",", "layers[0]: keys: field mean[0]");
  refused("0.1,", "1e39,", "layers[0]: keys: field mean[0]");
  refused("0.1,", "2e9,", "layers[0]: keys: field mean[0]: expected a number of up to 1e+09");
  refused("0.1,", "NaN,", "nibble_kv.json");
  refused("\"kv_heads\":2", "\"kv_heads\":9223372036854775808", "which is too large");
  refused("\"kv_heads\":2", "\"kv_heads\":2.0", "\"kv_heads\": expected an integer");
  refused("\"weights_xxh64\":\"0123\"", "\"weights_xxh64\":1", "expected a string");
  refused("\"form\":\"turned\"", "\"form\":\"centred\"",
          "layers[0]: values: field mean: is missing, which the form centred needs");
  refused("\"page_form\":\"turned\"", "\"page_form\":\"x\"",
          "layers[0]: keys: field page_form: \"x\"");
  refused("6.25", "\"6.25\"", "layers[1]: keys: ranges: field mean[5]");
  refused("\"step\":", "\"steps\":", "ranges: field step: is missing");
  refused("0.375,", "-0.375,", "ranges: field step: has a negative number");
  refused("0.375,", "", "ranges: field step: has 5 numbers");
  refused("}\n", "", "nibble_kv.json");  // cut off
  KvSidecarShape longer = kShape;
  longer.layers = 3;
  ASSERT_TRUE(write_kv_sidecar(sidecar(), kShape, path()).ok());
  EXPECT_THAT(read_kv_sidecar(path(), longer).status().message(),
              HasSubstr("field layers: has 2 entries, but the model has 3 layers"));
}

TEST_F(KvSidecarFile, WhatMayBeAbsentMayBeNull) {
  for (const auto& [from, to] :
       {std::pair<std::string, std::string>{"\"page_form\":\"turned\"", "\"page_form\":null"},
        {"\"weights_xxh64\":\"0123\"", "\"weights_xxh64\":null"}}) {
    const Status status = read_changed(from, to);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST_F(KvSidecarFile, NothingIsCentredBesideSinks) {
  KvSidecarShape sinks = kShape;
  sinks.sinks = true;
  KvSidecar centred = sidecar();
  const auto refused = [&](const char* words) {
    ASSERT_TRUE(write_kv_sidecar(centred, kShape, path()).ok());
    const Status status = read_kv_sidecar(path(), sinks).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr(words));
  };
  refused("layers[0]: keys: field form: cannot be centred");
  centred.layers[0].keys.form.centred = false;
  centred.layers[0].keys.page_form->centred = true;
  refused("layers[0]: keys: field page_form: cannot be centred");
  centred.layers[0].keys.page_form.reset();
  refused("layers[1]: keys: ranges: field mean");
  centred.layers[1].keys.ranges.reset();
  refused("layers[1]: values: field form: cannot be centred");
  centred.layers[1].values.form.centred = false;
  ASSERT_TRUE(write_kv_sidecar(centred, kShape, path()).ok());
  EXPECT_TRUE(read_kv_sidecar(path(), sinks).ok());
}

TEST_F(KvSidecarFile, LiesBesideItsModel) {
  EXPECT_EQ(kv_sidecar_path("models/a"), "models/a/nibble_kv.json");
  const std::string gguf = (root_ / "a.gguf").string();
  std::ofstream(gguf) << "GGUF";
  EXPECT_EQ(kv_sidecar_path(gguf), gguf + ".nibble_kv.json");
  EXPECT_EQ(read_kv_sidecar(path(), kShape).status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace nibble
