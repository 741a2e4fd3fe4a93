#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "model/model.h"
#include "model/tensor_check.h"
#include "model/testing/large_kv.h"
#include "model/testing/sequence_runner.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kSource = "tests/golden/llama3";

class ModelKvScales : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
    backend_ = make_cpu_backend({.threads = 2}).value();
    tokens_.resize(90);
    std::iota(tokens_.begin(), tokens_.end(), 3);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::vector<NamedScale>& scales) { write_large_kv(kSource, folder_, scales); }

  std::vector<float> logits(const std::string& folder, KvCode code) {
    auto model = load_model(folder, *backend_, {.max_batch_tokens = 512, .max_logit_rows = 512});
    CHECK_MSG(model.ok(), "{}", model.status().message());
    return SequenceRunner(**model, *backend_, code).feed_in_chunks(tokens_, 1, 70);
  }

  fs::path folder_;
  std::unique_ptr<Backend> backend_;
  std::vector<int32_t> tokens_;
};

TEST_F(ModelKvScales, AreThoseThatTheKeysAndValuesNeed) {
  ASSERT_EQ(load_model_config(kSource)->num_layers, 2);
  write(fitting_kv_scales(2));
  const std::vector<float> expected = logits(kSource, KvCode::kFp8);
  EXPECT_EQ(logits(folder_.string(), KvCode::kFp8), expected);
  EXPECT_TRUE(check_model_tensors(folder_.string()).ok());
  EXPECT_TRUE(check_loadable(folder_.string()).ok());
  write({});
  EXPECT_NE(logits(folder_.string(), KvCode::kFp8), expected);
}

TEST_F(ModelKvScales, ChangeNoOtherCache) {
  write(fitting_kv_scales(2));
  std::vector<std::vector<float>> with;
  for (const KvCode code : {KvCode::kF32, KvCode::kBf16, KvCode::kInt8, KvCode::kInt4}) {
    with.push_back(logits(folder_.string(), code));
  }
  write({});
  EXPECT_EQ(logits(folder_.string(), KvCode::kF32), with[0]);
  EXPECT_EQ(logits(folder_.string(), KvCode::kBf16), with[1]);
  EXPECT_EQ(logits(folder_.string(), KvCode::kInt8), with[2]);
  EXPECT_EQ(logits(folder_.string(), KvCode::kInt4), with[3]);
}

TEST_F(ModelKvScales, AreRefusedWhereTheyCannotBeUsed) {
  const auto refused = [&](const std::vector<NamedScale>& scales, const std::string& words) {
    write(scales);
    const auto model = load_model(folder_.string(), *backend_, {});
    ASSERT_FALSE(model.ok());
    EXPECT_THAT(model.status().message(), HasSubstr(words));
    EXPECT_THAT(check_model_tensors(folder_.string()).message(), HasSubstr(words));
    EXPECT_THAT(check_loadable(folder_.string()).message(), HasSubstr(words));
  };
  std::vector<NamedScale> scales = fitting_kv_scales(2);
  scales[3].value = -2.0F;
  refused(scales, "model.layers.1.self_attn.v_scale: the scale of an FP8 cache is -2");
  scales.pop_back();
  refused(scales, "model.layers.1.self_attn.k_scale: the scale of the layer's values is missing");
  scales = fitting_kv_scales(2);
  scales.push_back({"model.layers.2.self_attn.k_scale", 1.0F});
  refused(scales, "model.layers.2.self_attn.k_scale");
}

}  // namespace
}  // namespace nibble
