#include "gguf/split.h"

#include <filesystem>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gguf/testing/gguf_builder.h"

namespace nibble::gguf {
namespace {

using testing::HasSubstr;

class GgufSplit : public testing::Test {
 protected:
  void SetUp() override {
    // A folder for each test: they run at the same time.
    folder_ = testing::TempDir() + "gguf_split_" +
              testing::UnitTest::GetInstance()->current_test_info()->name() + "/";
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path(int number, int count = 3) const {
    return fmt::format("{}m-{:05}-of-{:05}.gguf", folder_, number, count);
  }
  // Part `number` (from 1) of three, with one tensor "t<number>".
  static GgufBuilder part(int number) {
    GgufBuilder builder;
    builder.add("general.name", fmt::format("part {}", number));
    builder.set_split(static_cast<uint16_t>(number - 1), 3, 3);
    builder.add_floats(fmt::format("t{}", number), {2}, {static_cast<float>(number), 0.5F});
    return builder;
  }
  void write_all() const {
    for (int number = 1; number <= 3; ++number) {
      part(number).write(path(number));
    }
  }
  static void expect_error(const std::string& path, StatusCode code, const std::string& text) {
    const auto set = FileSet::open(path);
    ASSERT_FALSE(set.ok());
    EXPECT_EQ(set.status().code(), code) << set.status().message();
    EXPECT_THAT(set.status().message(), HasSubstr(text));
    EXPECT_THAT(set.status().message(), HasSubstr(path));
  }

  std::string folder_;
};

TEST_F(GgufSplit, OneFileIsASetOfItself) {
  GgufBuilder().add("general.name", "whole").add_floats("t", {1}, {2.5F}).write(folder_ + "m.gguf");
  const auto set = FileSet::open(folder_ + "m.gguf");
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_EQ(set->parts().size(), 1U);
  EXPECT_EQ(set->tensor_count(), 1U);
  EXPECT_NE(set->find("t"), nullptr);
  EXPECT_EQ(set->find("u"), nullptr);
}

TEST_F(GgufSplit, ASetOfOneNeedsNoName) {
  GgufBuilder().set_split(0, 1, 0).write(folder_ + "m.gguf");
  EXPECT_TRUE(FileSet::open(folder_ + "m.gguf").ok());
  GgufBuilder().set_split(0, 0, 0).write(folder_ + "m.gguf");
  EXPECT_TRUE(FileSet::open(folder_ + "m.gguf").ok());
  GgufBuilder().write(path(1, 1));
  EXPECT_TRUE(FileSet::open(path(1, 1)).ok());
}

TEST_F(GgufSplit, TheFirstFileFindsAll) {
  write_all();
  auto opened = FileSet::open(path(1));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const FileSet set = std::move(*opened);
  EXPECT_EQ(set.parts().size(), 3U);
  EXPECT_EQ(set.tensor_count(), 3U);
  EXPECT_EQ(*set.metadata().require_string("general.name"), "part 1");
  for (int number = 1; number <= 3; ++number) {
    const Tensor* tensor = set.find(fmt::format("t{}", number));
    ASSERT_NE(tensor, nullptr);
    float value = 0;
    std::memcpy(&value, tensor->data.data(), sizeof(value));
    EXPECT_EQ(value, static_cast<float>(number));
  }
}

TEST_F(GgufSplit, ALaterFileNamesTheFirst) {
  write_all();
  expect_error(path(2), StatusCode::kInvalidArgument, "give the path of the first: " + path(1));
}

TEST_F(GgufSplit, MissingFilesAreNamed) {
  expect_error(path(1), StatusCode::kNotFound, "cannot open");
  part(1).write(path(1));
  part(2).write(path(2));
  expect_error(path(1), StatusCode::kNotFound, "1 is missing beside it: m-00003-of-00003.gguf;");
  GgufBuilder().set_split(0, 60000, 1).write(path(1, 60000));
  expect_error(path(1, 60000), StatusCode::kNotFound, "59999 are missing beside it: m-00002");
}

TEST_F(GgufSplit, NamesAndMetadataMustAgree) {
  write_all();
  part(1).write(folder_ + "renamed.gguf");
  expect_error(folder_ + "renamed.gguf", StatusCode::kInvalidArgument, "\"-00001-of-00003.gguf\"");
  part(2).write(path(1));
  expect_error(path(1), StatusCode::kCorrupt,
               "the name says file 1 of 3, the metadata file 2 of 3");
  GgufBuilder().write(path(1));
  expect_error(path(1), StatusCode::kCorrupt, "the metadata file 1 of 1");
  GgufBuilder().set_split(3, 3, 0).write(path(1));
  expect_error(path(1), StatusCode::kCorrupt, "split.no is 3, but split.count is 3");
}

TEST_F(GgufSplit, FilesOfDifferentSetsAreRefused) {
  write_all();
  part(3).write(path(2));
  const auto renamed = FileSet::open(path(1));
  EXPECT_EQ(renamed.status().code(), StatusCode::kCorrupt);
  EXPECT_THAT(renamed.status().message(),
              HasSubstr(path(2) + ": the name says file 2 of 3, the metadata file 3 of 3"));

  GgufBuilder().set_split(1, 3, 3).add_floats("t1", {1}, {0.0F}).write(path(2));
  EXPECT_THAT(FileSet::open(path(1)).status().message(),
              HasSubstr(path(2) + ": tensor t1 is in m-00001-of-00003.gguf, too"));

  GgufBuilder().set_split(1, 3, 3).write(path(2));
  expect_error(path(1), StatusCode::kCorrupt,
               "split.tensors.count is 3, but its 3 files hold 2 tensors");
}

TEST_F(GgufSplit, ADamagedFileOfASetIsNamed) {
  write_all();
  std::filesystem::resize_file(path(3), 100);
  EXPECT_THAT(FileSet::open(path(1)).status().message(), HasSubstr(path(3)));
}

}  // namespace
}  // namespace nibble::gguf
