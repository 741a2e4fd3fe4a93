#include "calibration/kv_calibrator.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "arch/kv_specs.h"
#include "base/f16.h"
#include "base/file.h"
#include "calibration/kv_ranges.h"
#include "model/model.h"
#include "quant/hadamard.h"
#include "synthetic/dummy.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kModel = "models/storyteller";
constexpr const char* kText = "tests/data/text/the_black_cat.txt";

class KvCalibration : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            fmt::format("kv_calibration_{}_{}",
                        testing::UnitTest::GetInstance()->current_test_info()->name(), ::getpid());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  /// A folder with links to all files of a model.
  [[nodiscard]] std::string linked(const std::string& model, const std::string& name) const {
    const fs::path folder = root_ / name;
    fs::create_directories(folder);
    for (const auto& file : fs::directory_iterator(model)) {
      fs::create_symlink(fs::absolute(file.path()), folder / file.path().filename());
    }
    return folder.string();
  }

  static KvCalibrationOptions options(const std::string& model) {
    return {.model = model, .text = {.path = kText, .windows = 3, .length = 90}, .threads = 2};
  }

  fs::path root_;
};

/// Means over all windows of what the whole model puts into a BF16 cache: of keys, then of values,
/// [layer, kv_heads, head_dim].
std::vector<double> means_of_model(const std::string& folder, const CalibrationTextOptions& text) {
  auto backend = make_cpu_backend({.threads = 1}).value();
  auto model = load_model(folder, *backend, {.max_batch_tokens = 512, .max_logit_rows = 1}).value();
  const ModelConfig& config = model->config();
  const int64_t pages = 20, page_size = 16;
  PagedKvCache cache =
      model
          ->make_cache(KvCacheShape::equal_pools(kv_specs(config, KvCode::kBf16), page_size, pages))
          .value();
  std::vector<int32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  const CalibrationText read = read_model_text(folder, config, text).value();
  const int64_t channels = config.num_kv_heads * config.head_dim;
  std::vector<double> means(static_cast<size_t>(2 * config.num_layers * channels));
  for (const std::vector<int32_t>& window : read.windows) {
    const auto count = static_cast<int32_t>(window.size());
    const SequenceSpan span{0, count, count, table.data(), count};
    model->forward({.tokens = window, .sequences = {&span, 1}, .logit_rows = {}}, cache, {});
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      const KvView kv = cache.view(layer);
      for (int64_t i = 0; i < count * 2 * channels; ++i) {
        const int64_t token = i / (2 * channels), head = i % channels / config.head_dim;
        const bool value = i / channels % 2 == 1;
        const int64_t page = table[static_cast<size_t>(token / page_size)];
        const std::byte* half = value ? kv.values(page, head) : kv.keys(page, head);
        const int64_t at = token % page_size * config.head_dim + i % config.head_dim;
        means[static_cast<size_t>((2 * layer + (value ? 1 : 0)) * channels + i % channels)] +=
            static_cast<double>(bf16_to_f32(reinterpret_cast<const uint16_t*>(half)[at])) /
            static_cast<double>(read.tokens());
      }
    }
  }
  return means;
}

TEST_F(KvCalibration, TakesTheMeansOfWhatTheModelCaches) {
  const KvCalibrationOptions how = options(linked(kModel, "model"));
  const auto sidecar = calibrate_kv(how);
  ASSERT_TRUE(sidecar.ok()) << sidecar.status().message();
  const std::vector<double> means = means_of_model(how.model, how.text);
  size_t at = 0;
  for (const KvSidecar::Layer& layer : sidecar->layers) {
    for (const KvSidecar::Half* half : {&layer.keys, &layer.values}) {
      for (const float mean : half->mean) {
        ASSERT_NEAR(mean, means[at], 1e-6 + 1e-5 * std::fabs(means[at])) << at;
        ++at;
      }
    }
  }
  EXPECT_EQ(at, means.size());
}

TEST_F(KvCalibration, ChoosesWhatLosesLeast) {
  const auto sidecar = calibrate_kv(options(linked(kModel, "model"))).value();
  double plain = 0, chosen = 0;
  for (const KvSidecar::Layer& layer : sidecar.layers) {
    for (const KvSidecar::Half* half : {&layer.keys, &layer.values}) {
      for (const double error : half->errors) {
        EXPECT_GT(error, 0);
        EXPECT_LT(error, 0.2);
        EXPECT_GE(error, half->errors.at(head_form_index(half->form)));
      }
    }
    plain += layer.keys.errors.at(head_form_index({}));
    chosen += layer.keys.errors.at(head_form_index(layer.keys.form));
  }
  EXPECT_LT(chosen, 0.7 * plain);  // 0.5 (measured)
}

// The whole range holds all that was added; parts of it lie about the same middle.
TEST_F(KvCalibration, RangesHoldWhatWasAdded) {
  constexpr int64_t kDim = 8;
  KvRanges ranges(2, kDim);
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < 40; ++i) {
    std::vector<float> row(kDim);
    for (size_t d = 0; d < row.size(); ++d) {
      row[d] =
          std::sin(static_cast<float>(i) * 0.7F + static_cast<float>(d)) + static_cast<float>(d);
    }
    ranges.add(1, row);
    rows.push_back(row);
    ranges.add(0, std::vector<float>(kDim, 2.0F));
  }
  for (const KvRanges::About about : {KvRanges::About::kMiddle, KvRanges::About::kZero}) {
    const bool sinks = about == KvRanges::About::kZero;
    const std::vector<KvSidecar::Ranges> all = ranges.candidates(about);
    for (const size_t which : {size_t{0}, all.size() / 2}) {
      const KvSidecar::Ranges& whole = all[which];
      EXPECT_EQ(whole.turned, which != 0);
      ASSERT_EQ(whole.mean.empty(), sinks);
      for (std::vector<float> row : rows) {
        for (size_t d = 0; !sinks && d < row.size(); ++d) {
          row[d] -= whole.mean[kDim + d];
        }
        if (whole.turned) {
          hadamard(row.data(), kDim);
        }
        for (size_t d = 0; d < row.size(); ++d) {  // half a code beyond the outermost is theirs
          const float code = row[d] / whole.step[kDim + d] + 8.0F;
          EXPECT_GE(code, -0.01F);
          EXPECT_LE(code, sinks ? 15.51F : 15.01F);
        }
      }
      EXPECT_FLOAT_EQ(all[which + 1].step[kDim], 0.85F * whole.step[kDim]);
    }
    EXPECT_EQ(all[0].step[0], sinks ? 2.0F / 7.5F : 0.0F);  // a channel of one number
  }
}

TEST_F(KvCalibration, RangesAndFormsOfPagesAreThere) {
  const auto sidecar = calibrate_kv(options(linked(kModel, "model"))).value();
  ASSERT_TRUE(has_ranges(sidecar));
  for (const KvSidecar::Layer& layer : sidecar.layers) {
    EXPECT_TRUE(layer.keys.page_form.has_value());
    EXPECT_EQ(layer.keys.ranges->step.size(), layer.keys.mean.size());
    EXPECT_EQ(layer.keys.ranges->mean.size(), layer.keys.mean.size());
    EXPECT_TRUE(std::ranges::all_of(layer.values.ranges->step, [](float x) { return x > 0; }));
  }
}

TEST_F(KvCalibration, BytesDoNotDependOnThreads) {
  KvCalibrationOptions how = options(linked(kModel, "one"));
  how.threads = 1;
  ASSERT_TRUE(calibrate_kv(how).ok());
  how = options(linked(kModel, "two"));
  ASSERT_TRUE(calibrate_kv(how).ok());
  const auto bytes = [&](const char* name) {
    return read_file(kv_sidecar_path((root_ / name).string())).value();
  };
  EXPECT_EQ(bytes("one"), bytes("two"));
}

TEST_F(KvCalibration, OneFormForAllLayers) {
  KvCalibrationOptions how = options(linked(kModel, "model"));
  how.form = HeadForm{.centred = true};
  const auto sidecar = calibrate_kv(how).value();
  EXPECT_EQ(describe(sidecar), "keys centred in 8 layers; values centred in 8 layers");
}

TEST_F(KvCalibration, CentresNothingBesideSinks) {
  Json json = Json::parse(read_file("tests/golden/gpt_oss/config.json").value()).value();
  json.set("vocab_size", 512);  // of a tokenizer of bytes
  std::ofstream(root_ / "config.json") << json.dump();
  KvCalibrationOptions how = options((root_ / "model").string());
  const auto made = make_dummy_checkpoint(
      {.config = (root_ / "config.json").string(), .destination = how.model, .threads = 2});
  ASSERT_TRUE(made.ok()) << made.status().message();
  how.text.length = 40;
  const auto config = load_model_config(how.model);
  ASSERT_TRUE(config.ok() && config->sinks);
  for (const std::optional<HeadForm> form :
       {std::optional<HeadForm>(), std::optional(HeadForm{.centred = true, .turned = true})}) {
    how.form = form;
    const auto sidecar = calibrate_kv(how);
    ASSERT_TRUE(sidecar.ok()) << sidecar.status().message();
    for (const KvSidecar::Layer& layer : sidecar->layers) {
      for (const KvSidecar::Half* half : {&layer.keys, &layer.values}) {
        EXPECT_FALSE(half->form.centred);
        EXPECT_TRUE(half->mean.empty());
      }
    }
    EXPECT_TRUE(read_kv_sidecar(kv_sidecar_path(how.model), kv_sidecar_shape(*config)).ok());
  }
}

TEST_F(KvCalibration, LeavesNothingWhereItEndsEarly) {
  const std::atomic<bool> stop = true;
  KvCalibrationOptions how = options(linked(kModel, "model"));
  const auto files = [&] { return std::distance(fs::directory_iterator(how.model), {}); };
  const auto before = files();
  how.stop = &stop;
  EXPECT_EQ(calibrate_kv(how).status().code(), StatusCode::kCancelled);
  EXPECT_EQ(files(), before);
  how.text.length = 1 << 20;
  EXPECT_THAT(calibrate_kv(how).status().message(), HasSubstr("--calibration-length"));
}

}  // namespace
}  // namespace nibble
