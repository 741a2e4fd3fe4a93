#include "checkpoint/kv_sidecar.h"

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

#include "base/check.h"
#include "model/model.h"
#include "model/testing/sequence_runner.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ModelKvSidecar : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              fmt::format("{}_{}", testing::UnitTest::GetInstance()->current_test_info()->name(),
                          ::getpid());
    fs::create_directories(folder_);
    for (const auto& file : fs::directory_iterator("tests/golden/llama3")) {
      fs::create_symlink(fs::absolute(file.path()), folder_ / file.path().filename());
    }
    shape_ = kv_sidecar_shape(load_model_config(folder_.string()).value());
    backend_ = make_cpu_backend({.threads = 2}).value();
    tokens_.resize(60);
    std::iota(tokens_.begin(), tokens_.end(), 3);
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string path() const { return kv_sidecar_path(folder_.string()); }

  /// One form in all layers, with means of this size.
  void write(HeadForm form, float mean) const {
    KvSidecar sidecar;
    for (int64_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<float> means(static_cast<size_t>(shape_.kv_heads * shape_.head_dim), mean);
      for (size_t i = 0; i < means.size(); i += 3) {
        means[i] = -0.5F * mean;
      }
      const KvSidecar::Half half{.form = form, .mean = means};
      sidecar.layers.push_back({half, half});
    }
    ASSERT_TRUE(write_kv_sidecar(sidecar, shape_, path()).ok());
  }

  [[nodiscard]] Result<std::unique_ptr<Model>> load(KvCode code) const {
    return load_model(folder_.string(), *backend_,
                      {.max_batch_tokens = 512, .max_logit_rows = 512, .kv_code = code});
  }

  [[nodiscard]] std::vector<float> logits(KvCode code) const {
    auto model = load(code);
    CHECK_MSG(model.ok(), "{}", model.status().message());
    return SequenceRunner(**model, *backend_, code).feed_in_chunks(tokens_, 1, 40);
  }

  fs::path folder_;
  KvSidecarShape shape_;
  std::unique_ptr<Backend> backend_;
  std::vector<int32_t> tokens_;
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += std::pow(static_cast<double>(a[i]) - b[i], 2);
  }
  return std::sqrt(squares);
}

TEST_F(ModelKvSidecar, DecidesTheFormOfInt4Caches) {
  const std::vector<float> exact = logits(KvCode::kF32);
  const std::vector<float> turned = logits(KvCode::kInt4);
  write({.turned = true}, 0);
  EXPECT_EQ(logits(KvCode::kInt4), turned);  // what it is without a file
  write({}, 0);
  const std::vector<float> plain = logits(KvCode::kInt4);
  EXPECT_NE(plain, turned);
  // Whatever the means are, results are those of the model but for the codes' rounding.
  for (const HeadForm form : {HeadForm{.centred = true}, {.centred = true, .turned = true}}) {
    write(form, 0.02F);
    const std::vector<float> centred = logits(KvCode::kInt4);
    EXPECT_NE(centred, plain);
    EXPECT_NE(centred, turned);
    EXPECT_LT(distance(centred, exact), 1.5 * distance(plain, exact));
  }
}

TEST_F(ModelKvSidecar, ChangesNoOtherCache) {
  for (const KvCode code : {KvCode::kF32, KvCode::kBf16, KvCode::kInt8, KvCode::kFp8}) {
    fs::remove(path());
    const std::vector<float> before = logits(code);
    write({.centred = true, .turned = true}, 1);
    EXPECT_EQ(logits(code), before) << kv_code_name(code);
    std::ofstream(path()) << "damaged";
    EXPECT_EQ(logits(code), before) << kv_code_name(code);
  }
  const Status status = load(KvCode::kInt4).status();
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("nibble_kv.json"));
}

TEST_F(ModelKvSidecar, StaticRangesAreNeeded) {
  const auto refused = [&](const char* words) {
    const Status status = load(KvCode::kInt4Static).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("--kv-cache-dtype int4_static"));
    EXPECT_THAT(status.message(), HasSubstr(words));
    EXPECT_THAT(status.message(), HasSubstr("nibble calibrate-kv"));
  };
  refused("does not exist");
  write({.turned = true}, 0);
  refused("has no ranges");
}

// Steps that suit the numbers lose less than such as make zeros of them.
TEST_F(ModelKvSidecar, StaticRangesAreUsed) {
  const std::vector<float> exact = logits(KvCode::kF32);
  const auto with_ranges = [&](bool turned, float step, float mean) {
    const auto channels = static_cast<size_t>(shape_.kv_heads * shape_.head_dim);
    KvSidecar sidecar;
    const KvSidecar::Half half{.ranges =
                                   KvSidecar::Ranges{.turned = turned,
                                                     .mean = std::vector<float>(channels, mean),
                                                     .step = std::vector<float>(channels, step)}};
    sidecar.layers.assign(static_cast<size_t>(shape_.layers), {half, half});
    CHECK(write_kv_sidecar(sidecar, shape_, path()).ok());
    return distance(logits(KvCode::kInt4Static), exact);
  };
  for (const bool turned : {false, true}) {
    const double coarse = with_ranges(turned, 64, 0);  // all numbers become 0
    double least = coarse;
    for (const float step : {4.0F, 1.0F, 0.25F, 0.06F}) {
      least = std::min(least, with_ranges(turned, step, 0));
    }
    EXPECT_LT(least, 0.5 * coarse);
  }
}

TEST_F(ModelKvSidecar, DecidesTheFormOfValuesInPages) {
  const std::vector<float> page = logits(KvCode::kInt4Page);
  write({}, 0);  // values plain, as keys are anyway
  EXPECT_NE(logits(KvCode::kInt4Page), page);
}

TEST_F(ModelKvSidecar, OfAnotherModelIsRefused) {
  shape_.layers += 1;
  write({.centred = true}, 1);
  EXPECT_THAT(load(KvCode::kInt4).status().message(),
              HasSubstr("nibble_kv.json: field layers: has 3 entries, but the model has 2 layers"));
}

}  // namespace
}  // namespace nibble
