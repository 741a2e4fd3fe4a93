#include "checkpoint/safetensors.h"

#include <cstring>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/safetensors_header.h"

namespace nibble {
namespace {

using testing::HasSubstr;

std::string file_bytes(const std::string& header, size_t data_bytes) {
  const uint64_t size = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &size, 8);
  return bytes + header + std::string(data_bytes, 'x');
}

Result<SafetensorsContent> parse(const std::string& bytes) {
  return parse_safetensors(std::as_bytes(std::span(bytes.data(), bytes.size())), "f.safetensors");
}

struct Malformed {
  std::string header;
  size_t data_bytes;
  std::string complaint;
};

TEST(Safetensors, RefusesMalformedHeaders) {
  const std::string a4 = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  const std::vector<Malformed> cases = {
      {"", 0, "header"},
      {"{", 0, "header"},
      {"[]", 0, "not a JSON object"},
      {"null", 0, "not a JSON object"},
      {"{}x", 0, "header"},
      {"{\"\xff\":1}", 0, "header"},
      {"\xef\xbb\xbf{}", 0, "header"},
      {"{\"a\":1}", 0, "not an object"},
      {R"({"a":[]})", 0, "not an object"},
      {R"({"__metadata__":1})", 0, "__metadata__"},
      {R"({"__metadata__":{"k":1}})", 0, "\"k\" is not a string"},
      {R"({"__metadata__":{"k":null}})", 0, "not a string"},
      {R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, "dtype"},
      {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4, "dtype"},
      {R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4, "unknown dtype \"F31\""},
      {R"({"a":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}})", 4, "unknown dtype"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "shape"},
      {R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", 4, "shape"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "non-negative"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "non-negative"},
      {R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", 4, "non-negative"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})", 4,
       "non-negative"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "instead of 2"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", 4, "instead of 2"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "backwards"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", 4, "non-negative"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "needs 8 bytes"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,8]}})", 8, "needs 4 bytes"},
      {R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,4]}})", 4, "needs 0 bytes"},
      {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2, "whole number of bytes"},
      {R"({"a":{"dtype":"F6_E2M3","shape":[2],"data_offsets":[0,2]}})", 2, "whole number"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4,
       "overflows"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "a hole"},
      {R"({)" + a4 + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", 12, "a hole"},
      {R"({)" + a4 + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})", 8, "overlap"},
      {R"({)" + a4 + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "overlap"},
      {"{" + a4 + "," + a4 + "}", 4, "header"},
      {"{" + a4 + "}", 3, "cut off"},
      {"{" + a4 + "}", 0, "cut off"},
      {"{" + a4 + "}", 5, "1 bytes follow"},
      {"{}", 1, "1 bytes follow"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "header"},
  };
  for (const Malformed& malformed : cases) {
    const auto result = parse(file_bytes(malformed.header, malformed.data_bytes));
    ASSERT_FALSE(result.ok()) << malformed.header;
    EXPECT_EQ(result.status().code(), StatusCode::kCorrupt) << malformed.header;
    EXPECT_THAT(result.status().message(), HasSubstr("f.safetensors")) << malformed.header;
    EXPECT_THAT(result.status().message(), HasSubstr(malformed.complaint)) << malformed.header;
  }
}

TEST(Safetensors, RefusesImpossibleHeaderSizes) {
  EXPECT_THAT(parse("").status().message(), HasSubstr("only 0 bytes"));
  EXPECT_THAT(parse("1234567").status().message(), HasSubstr("only 7 bytes"));
  EXPECT_THAT(parse(std::string("\x03\0\0\0\0\0\0\0{}", 10)).status().message(),
              HasSubstr("cut off"));
  EXPECT_THAT(parse(std::string(16, '\xff')).status().message(), HasSubstr("exceeds the limit"));
  const std::string just_over("\x01\xe1\xf5\x05\0\0\0\0{}", 10);  // 100,000,001
  EXPECT_THAT(parse(just_over).status().message(), HasSubstr("exceeds the limit"));
}

TEST(Safetensors, SaysWhatOtherFilesAre) {
  struct Foreign {
    std::string bytes;
    std::string name;
    std::string meaning;
  };
  using namespace std::string_literals;
  const std::vector<Foreign> cases = {
      {"{\n  \"architectures\": []}", "config.json", "the config.json of a model; give the folder"},
      {R"({"weight_map": {}})", "model.safetensors.index.json", "the index of a model"},
      {R"({"version": "1.0"})", "tokenizer.json", "part of a model's tokenizer"},
      {" [1, 2, 3, 4]", "list.json", "a JSON file"},
      {"GGUF\x03\0\0\0\0\0\0\0"s, "m.gguf", "a GGUF file"},
      {"PK\x03\x04\0\0\x08\x08\0\0"s, "pytorch_model.bin", "PyTorch's pickle format"},
      {"PK\x03\x04\x14\0\0\0\x08\0"s, "m.pt", "PyTorch's pickle format"},
      {"\x80\x02\x8a\nl\xfc\x9c\x46\xf9"s, "m.pt", "PyTorch's pickle format"},
      {"\x1f\x8b\x08\0\0\0\0\0\0\x03"s + std::string(1 << 20, 'x'), "m.gz", "gzip; unpack"},
      {"version https://git-lfs.github.com/spec/v1\n", "model.safetensors", "git lfs pull"},
      {"<!DOCTYPE html><html>", "model.safetensors", "a web page"},
      {"Once upon a time there was a k\xc3\xb6nig.", "text.txt", "a text file"},
  };
  for (const Foreign& foreign : cases) {
    const auto bytes = std::as_bytes(std::span(foreign.bytes.data(), foreign.bytes.size()));
    const Status status = parse_safetensors(bytes, foreign.name).status();
    EXPECT_EQ(status.code(), StatusCode::kCorrupt);
    EXPECT_THAT(status.message(), HasSubstr(foreign.name + ": not a safetensors file, but "));
    EXPECT_THAT(status.message(), HasSubstr(foreign.meaning));
  }
}

TEST(Safetensors, AcceptsScalarsEmptyTensorsAndAnyOrder) {
  const auto content = parse(file_bytes(
      R"({"z":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},"s":{"dtype":"F32","shape":[],)"
      R"("data_offsets":[0,4]},"e":{"dtype":"I64","shape":[0,5],"data_offsets":[4,4]},)"
      R"("f":{"dtype":"F4","shape":[2],"data_offsets":[7,8]},"__metadata__":{"format":"pt"}}  )",
      8));
  ASSERT_TRUE(content.ok()) << content.status().message();
  ASSERT_EQ(content->tensors.size(), 4U);
  EXPECT_EQ(content->tensors[0].name, "s");
  EXPECT_EQ(content->tensors[0].elements(), 1);
  EXPECT_EQ(content->tensors[1].name, "e");
  EXPECT_EQ(content->tensors[1].data.size(), 0U);
  EXPECT_EQ(content->tensors[2].data.size(), 3U);
  EXPECT_EQ(content->metadata.at("format"), "pt");
}

// Headers as writers give them are read without a tree, others with one: to the same end.
TEST(Safetensors, UsualAndUnusualHeadersSayTheSame) {
  const std::string a = R"("dtype":"F32","shape":[1,2],"data_offsets":[0,8])";
  const std::string b = R"("data_offsets":[8,10],"dtype":"BF16","shape":[])";
  const std::string metadata = R"("__metadata__":{"format":"pt","k":"\u00e4 \"v\""})";
  const auto header = [&](const std::string& more, const std::string& name) {
    return "{" + metadata + ",\"" + name + "\":{" + a + more + "},\n \"b\": { " + b + " } }  ";
  };
  const std::string usual = header("", "a.\\u0061");
  const std::string unusual = header(R"(,"note":[null,{"x":1.5}])", "a.a");
  ASSERT_TRUE(read_usual_header(usual).has_value());
  ASSERT_FALSE(read_usual_header(unusual).has_value());
  for (const std::string& text : {usual, unusual}) {
    const auto content = parse(file_bytes(text, 10));
    ASSERT_TRUE(content.ok()) << content.status().message();
    EXPECT_EQ(content->metadata.at("k"), "\u00e4 \"v\"");
    EXPECT_EQ(content->metadata.size(), 2U);
    ASSERT_EQ(content->tensors.size(), 2U);
    EXPECT_EQ(content->tensors[0].name, "a.a");
    EXPECT_EQ(content->tensors[0].shape, (std::vector<int64_t>{1, 2}));
    EXPECT_EQ(content->tensors[1].dtype, DType::kBF16);
    EXPECT_TRUE(content->tensors[1].shape.empty());
    EXPECT_EQ(content->tensors[1].data.size(), 2U);
  }
}

TEST(Safetensors, HeadersThatAreRefusedAreNotUsual) {
  const std::string a = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  for (const std::string& text :
       {"{" + a + "," + a + "}", "{" + a + "}x", std::string("{}}"), std::string("[]"),
        std::string(R"({"__metadata__":{"k":"v","k":"v"}})"),
        std::string(R"({"__metadata__":{},"__metadata__":{}})"),
        std::string(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})"),
        std::string(R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})"),
        std::string(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})"),
        std::string(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})"),
        std::string(R"({"a":{"dtype":{},"shape":[1],"data_offsets":[0,4]}})")}) {
    EXPECT_FALSE(read_usual_header(text).has_value()) << text;
    EXPECT_FALSE(parse(file_bytes(text, 4)).ok()) << text;
  }
  EXPECT_TRUE(read_usual_header("{" + a + "}").has_value());
}

TEST(Safetensors, HeaderOfTheFormatNotes) {
  const std::vector<TensorPlan> plan = {{"a", DType::kF32, {2}, 8}};
  const std::string expected =
      std::string("\x58\0\0\0\0\0\0\0", 8) +
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})" +
      "   ";
  EXPECT_EQ(safetensors_header(plan), expected);
}

}  // namespace
}  // namespace nibble
