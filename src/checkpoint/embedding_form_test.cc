#include "checkpoint/embedding_form.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

class EmbeddingFormTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(::testing::TempDir()) / (std::string("embedding_form_") + info->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "1_Pooling");
    fs::create_directories(folder_ / "other");
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
  }
  Result<EmbeddingForm> read(std::optional<Pooling> asked = std::nullopt) {
    return read_embedding_form(folder_.string(), asked);
  }
  std::string error() {
    const auto form = read();
    EXPECT_FALSE(form.ok());
    return form.status().message();
  }

  fs::path folder_;
};

constexpr const char* kModules = R"([
  {"idx":0,"name":"0","path":"","type":"sentence_transformers.models.Transformer"},
  {"idx":1,"name":"1","path":"other","type":"sentence_transformers.models.Pooling"},
  {"idx":2,"name":"2","path":"2_Normalize","type":"sentence_transformers.models.Normalize"}])";

TEST_F(EmbeddingFormTest, IsTheLastTokensWhereNothingIsSaid) {
  EXPECT_EQ(read()->pooling, Pooling::kLast);
  EXPECT_FALSE(read()->can_be_cut);
  EXPECT_EQ(read(Pooling::kMean)->pooling, Pooling::kMean);
  EXPECT_EQ(read_embedding_form("model.gguf", std::nullopt)->pooling, Pooling::kLast);
}

TEST_F(EmbeddingFormTest, ReadsTheFilesOfSentenceTransformers) {
  write("1_Pooling/config.json",
        R"({"word_embedding_dimension":1024,"pooling_mode_cls_token":false,
            "pooling_mode_mean_tokens":true,"pooling_mode_lasttoken":false,"include_prompt":true})");
  EXPECT_EQ(read()->pooling, Pooling::kMean);
  EXPECT_EQ(read(Pooling::kLast)->pooling, Pooling::kLast);
  write("modules.json", kModules);
  write("other/config.json", R"({"pooling_mode_lasttoken":true})");
  EXPECT_EQ(read()->pooling, Pooling::kLast);
  write("other/config.json", R"({"pooling_mode":"mean"})");
  EXPECT_EQ(read()->pooling, Pooling::kMean);
}

TEST_F(EmbeddingFormTest, DimensionsAreThoseOfTheConfig) {
  write("config.json", R"({"is_matryoshka":true})");
  EXPECT_TRUE(read()->can_be_cut && read()->dimensions.empty());
  write("config.json", R"({"matryoshka_dimensions":[128,64]})");
  EXPECT_TRUE(read()->can_be_cut);
  EXPECT_EQ(read()->dimensions, (std::vector<int64_t>{128, 64}));
  write("config.json", R"({"matryoshka_dimensions":[0]})");
  EXPECT_THAT(error(), HasSubstr("config.json: field matryoshka_dimensions"));
}

TEST_F(EmbeddingFormTest, RefusesWhatIsNotComputed) {
  write("1_Pooling/config.json",
        R"({"pooling_mode_cls_token":true,"pooling_mode_mean_tokens":true})");
  EXPECT_THAT(error(), HasSubstr("cls_token+mean_tokens"));
  EXPECT_TRUE(read(Pooling::kMean).ok());
  write("1_Pooling/config.json", "{}");
  EXPECT_THAT(error(), HasSubstr("1_Pooling/config.json"));
  write("1_Pooling/config.json", "[");
  EXPECT_THAT(error(), HasSubstr("1_Pooling/config.json"));
  write("modules.json", R"([{"type":"sentence_transformers.models.Dense","path":"2_Dense"}])");
  EXPECT_THAT(error(), HasSubstr("models.Dense"));
  EXPECT_FALSE(read(Pooling::kMean).ok());
  for (const char* path : {"../elsewhere", "/etc", ""}) {
    write("modules.json", R"([{"type":"sentence_transformers.models.Pooling","path":")" +
                              std::string(path) + "\"}]");
    EXPECT_THAT(error(), HasSubstr("no folder of the model"));
  }
  for (const char* text : {"{}", "7", "\"x\""}) {
    write("modules.json", text);
    EXPECT_THAT(error(), HasSubstr("expected an array"));
  }
}

}  // namespace
}  // namespace nibble
