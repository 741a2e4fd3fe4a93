#include "quantizer/own_head.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint_writer.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int64_t kN = 3;
constexpr int64_t kK = 2;
constexpr float kTable[kN * kK] = {1, -2, 3, 0.5F, -6, 7};

/// A folder with the table of the embeddings in F32, or whatever tensors are named.
class OwnHead : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  void TearDown() override { fs::remove_all(folder_); }

  CheckpointReader stored(const std::vector<std::string>& tensors) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::vector<TensorPlan> plan;
    for (const std::string& name : tensors) {
      plan.push_back({name, DType::kF32, {kN, kK}, 0});
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, 1 << 20).value();
    for (const std::string& name : tensors) {
      EXPECT_TRUE(writer.write(name, std::as_bytes(std::span(kTable))).ok());
    }
    EXPECT_TRUE(writer.finish().ok());
    return CheckpointReader::open(folder_.string()).value();
  }

  static Json config(const char* text) { return Json::parse(text).value(); }

  fs::path folder_;
};

TEST_F(OwnHead, OfATiedModelReadsTheTable) {
  const Json llama = config(R"({"model_type":"llama"})");
  const CheckpointReader reader = stored({"model.embed_tokens.weight"});
  SourceModel model = list_source_matrices(reader, llama).value();
  EXPECT_EQ(find_head(llama, model), nullptr);
  const SourceMatrix* head = add_tied_head(reader, llama, model).value();
  ASSERT_NE(head, nullptr);
  EXPECT_EQ(head, find_head(llama, model));
  EXPECT_EQ(head->module(), "lm_head");
  EXPECT_EQ(head->n(), kN);
  EXPECT_EQ(head->k(), kK);
  float values[kN * kK] = {};
  ASSERT_TRUE(head->decode(0, kN, values).ok());
  EXPECT_THAT(values, testing::ElementsAreArray(kTable));
}

TEST_F(OwnHead, ThatIsStoredStaysTheOnlyOne) {
  for (const char* text : {R"({"model_type":"llama"})", "{}"}) {
    const CheckpointReader reader = stored({"model.embed_tokens.weight", "lm_head.weight"});
    SourceModel model = list_source_matrices(reader, config(text)).value();
    EXPECT_EQ(add_tied_head(reader, config(text), model).value(), nullptr);
    EXPECT_EQ(model.matrices.size(), 2U);
    EXPECT_EQ(find_head(config(text), model)->module(), "lm_head");
  }
}

TEST_F(OwnHead, NeedsAFamilyAndATable) {
  const CheckpointReader table = stored({"model.embed_tokens.weight"});
  SourceModel model = list_source_matrices(table, config("{}")).value();
  const Status unknown = add_tied_head(table, config("{}"), model).status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(unknown.message(), HasSubstr("not known"));
  const Json llama = config(R"({"model_type":"llama"})");
  const CheckpointReader other = stored({"model.layers.0.mlp.up_proj.weight"});
  SourceModel without = list_source_matrices(other, llama).value();
  const Status missing = add_tied_head(other, llama, without).status();
  EXPECT_EQ(missing.code(), StatusCode::kUnsupported);
  EXPECT_THAT(missing.message(), HasSubstr("model.embed_tokens.weight"));
}

TEST_F(OwnHead, UntiesTheConfigWhereItsFieldsAre) {
  const auto untied = [](const char* text) { return with_own_head(config(text)).dump(); };
  EXPECT_EQ(untied(R"({"a":1})"), R"({"a":1,"tie_word_embeddings":false})");
  EXPECT_EQ(untied(R"({"tie_word_embeddings":true,"a":1})"),
            R"({"tie_word_embeddings":false,"a":1})");
  EXPECT_EQ(untied(R"({"text_config":{"b":2}})"),
            R"({"text_config":{"b":2,"tie_word_embeddings":false}})");
  EXPECT_EQ(untied(R"({"tie_word_embeddings":true,"text_config":{"tie_word_embeddings":true}})"),
            R"({"tie_word_embeddings":false,"text_config":{"tie_word_embeddings":false}})");
}

}  // namespace
}  // namespace nibble
