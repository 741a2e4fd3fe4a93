#include "gguf/file.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "gguf/testing/gguf_builder.h"

namespace nibble::gguf {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint32_t kArray = 9;
constexpr uint32_t kF32 = 0;

Result<Content> parse(const std::string& bytes) {
  return parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf");
}

void expect_error(const std::string& bytes, StatusCode code, const std::string& text) {
  const auto content = parse(bytes);
  ASSERT_FALSE(content.ok()) << text;
  EXPECT_EQ(content.status().code(), code) << content.status().message();
  EXPECT_THAT(content.status().message(), testing::StartsWith("m.gguf: "));
  EXPECT_THAT(content.status().message(), HasSubstr(text));
}

void expect_corrupt(const GgufBuilder& builder, const std::string& text) {
  expect_error(builder.build(), StatusCode::kCorrupt, text);
}

GgufBuilder small_file() {
  GgufBuilder builder;
  builder.add("general.architecture", "none").add_array<std::string>("list", {"a", "bc"});
  builder.add("flag", true).add_floats("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  const std::vector<std::byte> blocks(2 * 34, std::byte{5});
  return builder.add_tensor("b.weight", Type::kQ8_0, {2, 1, 32}, blocks);
}

TEST(GgufFile, TensorsAreListed) {
  for (const uint32_t version : {2U, 3U}) {
    GgufBuilder builder = small_file();
    builder.version = version;
    const std::string bytes = builder.build();
    const auto content = parse(bytes);
    ASSERT_TRUE(content.ok()) << content.status().message();
    EXPECT_EQ(content->version, version);
    EXPECT_EQ(content->alignment, 32U);
    ASSERT_EQ(content->tensors().size(), 2U);
    const Tensor& a = content->tensors()[0];
    EXPECT_EQ(a.name, "a");
    EXPECT_EQ(a.type, Type::kF32);
    EXPECT_THAT(a.shape, ElementsAre(2, 3));
    EXPECT_EQ(a.data.size(), 24U);
    EXPECT_EQ((a.data.data() - std::as_bytes(std::span(bytes)).data()) % 32, 0);
    const Tensor* b = content->find("b.weight");
    ASSERT_NE(b, nullptr);
    EXPECT_THAT(b->shape, ElementsAre(2, 1, 32));
    EXPECT_EQ(b->elements(), 64);
    EXPECT_EQ(b->blocks(), 2);
    EXPECT_EQ(b->data.size(), 68U);
    EXPECT_TRUE(std::ranges::all_of(b->data, [](std::byte byte) { return byte == std::byte{5}; }));
    EXPECT_EQ(content->find("c"), nullptr);
    EXPECT_TRUE(*content->metadata.require_bool("flag"));
  }
}

TEST(GgufFile, ScalarsAndOtherAlignmentsAreRead) {
  GgufBuilder builder;
  builder.set_alignment(128).add_floats("scalar", {}, {4.0F});
  const std::vector<std::byte> block(144, std::byte{1});
  builder.add_tensor("k", Type::kQ4_K, {1, 1, 1, 256}, block);
  const std::string bytes = builder.build();
  const auto content = parse(bytes);
  ASSERT_TRUE(content.ok()) << content.status().message();
  EXPECT_EQ(content->alignment, 128U);
  EXPECT_EQ(content->find("scalar")->elements(), 1);
  EXPECT_EQ(content->find("k")->data.data() - content->find("scalar")->data.data(), 128);
}

TEST(GgufFile, FilesWithoutTensorsAreRead) {
  const std::string bytes = GgufBuilder().add("a", uint8_t{1}).build();
  const auto content = parse(bytes);
  ASSERT_TRUE(content.ok()) << content.status().message();
  EXPECT_TRUE(content->tensors().empty());
  EXPECT_TRUE(parse(GgufBuilder().build()).ok());
}

TEST(GgufFile, EveryBeginningIsRefused) {
  const std::string bytes = small_file().build();
  ASSERT_TRUE(parse(bytes).ok());
  for (size_t size = 0; size < bytes.size(); ++size) {
    // Freshly allocated, so that ASan sees a read behind the end.
    expect_error(std::string(bytes.data(), size), StatusCode::kCorrupt, "");
  }
  expect_error(bytes.substr(0, bytes.size() - 1), StatusCode::kCorrupt, "tensor b.weight");
  expect_error(bytes.substr(0, 30), StatusCode::kCorrupt, "download it again");
}

TEST(GgufFile, OtherFilesAndVersionsAreNamed) {
  expect_error("", StatusCode::kCorrupt, "the magic number needs 4 bytes");
  expect_error("PK\x03\x04 and more", StatusCode::kCorrupt, "it begins with the bytes 50 4b 03 04");
  GgufBuilder builder;
  builder.version = 1;
  expect_error(builder.build(), StatusCode::kUnsupported, "version 1");
  builder.version = 4;
  expect_error(builder.build(), StatusCode::kUnsupported, "version 4");
  builder.version = 0;
  expect_error(builder.build(), StatusCode::kUnsupported, "version 0");
  builder.version = 3U << 24;
  expect_error(builder.build(), StatusCode::kUnsupported, "big-endian");
  EXPECT_TRUE(is_gguf(std::as_bytes(std::span("GGUF....", 8))));
  EXPECT_FALSE(is_gguf(std::as_bytes(std::span("GGU", 3))));
}

TEST(GgufFile, CountsBeyondTheFileAreRefused) {
  for (const uint64_t count : {uint64_t{9}, uint64_t{1} << 32, uint64_t{1} << 61, ~uint64_t{0}}) {
    GgufBuilder builder;
    builder.tensor_count = count;
    expect_corrupt(builder, fmt::format("{} tensors do not fit", count));
    builder.tensor_count = 0;
    builder.entry_count = count;
    expect_corrupt(builder, fmt::format("{} keys of metadata do not fit", count));
  }
}

TEST(GgufFile, LengthsBeyondTheFileAreRefused) {
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 32, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    const std::string text = GgufBytes().put(length).bytes + "ab";
    expect_corrupt(GgufBuilder().add_raw("k", 8, text), "metadata k: a string needs");
    const std::string list = GgufBytes().put(uint32_t{8}).put(uint64_t{1}).bytes;
    expect_corrupt(GgufBuilder().add_raw("k", kArray, list + text),
                   "metadata k: element 0: a string");
    for (const uint32_t type : {0U, 5U, 8U, 12U}) {
      const std::string many = GgufBytes().put(type).put(length).bytes;
      expect_corrupt(GgufBuilder().add_raw("k", kArray, many), "metadata k: ");
    }
  }
}

TEST(GgufFile, BadKeysAndValuesAreNamed) {
  expect_corrupt(GgufBuilder().add("a", 1).add("b", 2).add("a", 3), "metadata a is there twice");
  expect_corrupt(GgufBuilder().add("", 1), "is empty");
  expect_corrupt(GgufBuilder().add("a\xff", 1), "is not UTF-8");
  expect_corrupt(GgufBuilder().add(std::string(65536, 'k'), 1), "longer than 65,535 bytes");
  expect_corrupt(GgufBuilder().add_raw("k", 13, "12345678"), "metadata k: value type 13");
  expect_corrupt(GgufBuilder().add_raw("k", 7, "\x02"), "metadata k: a bool is 2");
  expect_corrupt(GgufBuilder().add_array<uint8_t>("x", {1}).add_raw(
                     "k", kArray, GgufBytes().put(7).put(uint64_t{2}).bytes + "\x01\x03"),
                 "metadata k: a bool is 3");
  const std::string inner = GgufBytes().put(uint32_t{0}).put(uint64_t{0}).bytes;
  expect_error(GgufBuilder()
                   .add_raw("k", kArray, GgufBytes().put(kArray).put(uint64_t{1}).bytes + inner)
                   .build(),
               StatusCode::kUnsupported, "metadata k: arrays of arrays");
}

TEST(GgufFile, BadAlignmentsAreNamed) {
  expect_corrupt(GgufBuilder().add("general.alignment", uint32_t{0}), "general.alignment is 0");
  expect_corrupt(GgufBuilder().add("general.alignment", uint32_t{48}), "general.alignment is 48");
  expect_corrupt(GgufBuilder().add("general.alignment", uint64_t{32}), "expected u32");
  expect_corrupt(GgufBuilder().add("general.alignment", "32"), "expected u32");
}

TEST(GgufFile, BadTensorsAreNamed) {
  constexpr uint64_t kHuge = uint64_t{1} << 62;
  const auto with = [](const std::vector<uint64_t>& dimensions, uint32_t type, uint64_t offset) {
    return small_file().add_raw_tensor("bad", dimensions, type, offset);
  };
  expect_corrupt(with({1, 1, 1, 1, 1}, kF32, 0), "tensor bad: 5 dimensions");
  expect_corrupt(with({4, 0}, kF32, 0), "tensor bad: dimension 1 is 0");
  expect_corrupt(with({~uint64_t{0}}, kF32, 0), "tensor bad: dimension 0 is 18446744073709551615");
  expect_corrupt(with({kHuge}, kF32, 0), "overflows");
  expect_corrupt(with({kHuge, 2, 2}, 24, 0), "tensor bad: shape [2, 2, 4611686018427387904]");
  expect_corrupt(with({kHuge / 4, 1}, kF32, 0), "tensor bad: its 4611686018427387904 bytes");
  expect_corrupt(with({33, 32}, 2, 0), "tensor bad: rows of 33 elements");
  expect_corrupt(with({128, 2}, 12, 0), "rows of 128 elements are no whole number of Q4_K blocks");
  expect_corrupt(with({}, 8, 0), "rows of 1 elements");
  expect_corrupt(with({1}, 77, 0), "tensor bad: type number 77");
  expect_error(with({256}, 16, 0).build(), StatusCode::kUnsupported, "tensor bad: type IQ2_XXS");
  expect_corrupt(with({1}, kF32, 4), "no multiple of the alignment 32");
  expect_corrupt(with({1}, kF32, 1 << 20), "tensor bad: its 4 bytes at 1048576 do not fit");
  expect_corrupt(with({1}, kF32, ~uint64_t{31}), "tensor bad: its 4 bytes");
  expect_corrupt(with({1}, kF32, 64), "tensor bad: its data begins at 64, within that of b.weight");
  expect_corrupt(with({1}, kF32, 32), "tensor bad: its data begins at 32, within that of b.weight");
  expect_corrupt(small_file().add_raw_tensor("a", {1}, kF32, 0), "tensor a is there twice");
  expect_corrupt(small_file().add_raw_tensor("", {1}, kF32, 0), "the name of a tensor");
  expect_corrupt(small_file().add_raw_tensor("\xc0\x80", {1}, kF32, 0), "is not UTF-8");
}

// In any order, and with room between them.
TEST(GgufFile, TensorsMayLieAnywhere) {
  GgufBuilder builder;
  builder.add_raw_tensor("last", {2}, kF32, 64).add_floats("first", {1}, {1.0F});
  std::string bytes = builder.build();
  bytes.resize(bytes.size() - 4 + 64 + 8);
  const auto content = parse(bytes);
  ASSERT_TRUE(content.ok()) << content.status().message();
  EXPECT_EQ(content->find("last")->data.data() - content->find("first")->data.data(), 64);
}

// For tests/interop/check_gguf.py, which reads the file with gguf-py.
TEST(GgufFile, IsWrittenForGgufPy) {
  const char* path = std::getenv("NIBBLE_GGUF_OUT");
  if (path == nullptr) {
    GTEST_SKIP() << "NIBBLE_GGUF_OUT names no file to write; run tests/interop/check_gguf.py";
  }
  GgufBuilder builder;
  builder.set_alignment(64).add("u8", uint8_t{200}).add("i8", int8_t{-100});
  builder.add("u16", uint16_t{60000}).add("i16", int16_t{-30000});
  builder.add("u32", uint32_t{4'000'000'000U}).add("i32", -7).add("f32", 0.5F).add("bool", true);
  builder.add("string", "text").add("u64", std::numeric_limits<uint64_t>::max());
  builder.add("i64", -(int64_t{1} << 60)).add("f64", 0.1);
  builder.add_array<std::string>("strings", {"a", "", "\u4e16"});
  builder.add_array<float>("floats", {0.5F, -1.5F}).add_array<int32_t>("ints", {-1, 2});
  builder.add_floats("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  std::vector<std::byte> blocks(68);
  for (size_t i = 0; i < blocks.size(); ++i) {
    blocks[i] = static_cast<std::byte>(i);
  }
  builder.add_tensor("b", Type::kQ8_0, {2, 1, 32}, blocks).write(path);
  EXPECT_TRUE(parse(builder.build()).ok());
}

TEST(GgufFile, ARealFileIsRead) {
  const char* named = std::getenv("NIBBLE_SHARED");
  const std::string path = std::string(named == nullptr ? "../shared" : named) +
                           "/data/tokenizers/gguf/ggml-vocab-llama-spm.gguf";
  if (!file_exists(path)) {
    GTEST_SKIP() << "no " << path << "; set NIBBLE_SHARED to its folder";
  }
  const auto file = MappedFile::open(path);
  const auto content = parse_gguf(file->bytes(), path);
  ASSERT_TRUE(content.ok()) << content.status().message();
  EXPECT_EQ(*content->metadata.require_string("tokenizer.ggml.model"), "llama");
  const auto tokens = content->metadata.require_strings("tokenizer.ggml.tokens");
  ASSERT_TRUE(tokens.ok()) << tokens.status().message();
  ASSERT_EQ(tokens->size(), 32000U);
  EXPECT_EQ((*tokens)[1], "<s>");
  EXPECT_EQ(content->metadata.require_floats("tokenizer.ggml.scores")->size(), 32000U);
}

}  // namespace
}  // namespace nibble::gguf
