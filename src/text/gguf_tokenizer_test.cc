#include "text/gguf_tokenizer.h"

#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gguf/file.h"
#include "gguf/testing/gguf_builder.h"
#include "text/tokenizer_loaders.h"

namespace nibble {
namespace {

using gguf::GgufBuilder;
using testing::ElementsAre;
using testing::HasSubstr;

/// What metadata makes of a tokenizer, or the error.
Result<std::unique_ptr<Tokenizer>> load(const GgufBuilder& builder) {
  const std::string bytes = builder.build();
  NIBBLE_ASSIGN_OR_RETURN(const gguf::Content content,
                          gguf::parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf"));
  NIBBLE_ASSIGN_OR_RETURN(const GgufTokenizerFiles files, gguf_tokenizer_files(content.metadata));
  NIBBLE_ASSIGN_OR_RETURN(const TokenizerConfig config,
                          TokenizerConfig::parse(files.config.dump(), "m.gguf"));
  return tokenizer_from_parsed(files.tokenizer, config, "m.gguf");
}

std::vector<int32_t> ids(const Tokenizer& tokenizer, std::string_view text) {
  return tokenizer.encode(text, SpecialTokens::kParse).value();
}

GgufBuilder byte_level(std::string_view pre) {
  GgufBuilder builder;
  builder.add("tokenizer.ggml.model", "gpt2");
  builder.add("tokenizer.ggml.pre", pre);
  builder.add_array<std::string>("tokenizer.ggml.tokens",
                                 {"<s>", "a", "b", "1", "ab", "11", "<u>", "Ġ"});
  builder.add_array<int32_t>("tokenizer.ggml.token_type", {3, 1, 1, 1, 1, 1, 4, 1});
  builder.add_array<std::string>("tokenizer.ggml.merges", {"a b", "1 1"});
  builder.add("tokenizer.ggml.bos_token_id", uint32_t{0});
  return builder;
}

TEST(GgufTokenizer, ByteLevelTextIsCutAsThePreTokenizerSays) {
  const auto gpt2 = load(byte_level("gpt-2"));
  ASSERT_TRUE(gpt2.ok()) << gpt2.status().message();
  EXPECT_THAT(ids(**gpt2, "ab11"), ElementsAre(4, 5));
  EXPECT_THAT(ids(**gpt2, "<s>a<u>"), ElementsAre(0, 1, 6));
  EXPECT_TRUE((*gpt2)->is_special(0));
  EXPECT_FALSE((*gpt2)->is_special(6));
  EXPECT_TRUE((*gpt2)->prompt_prefix().empty());
  EXPECT_EQ((*gpt2)->bos_token(), "<s>");
  const auto smollm = load(byte_level("smollm"));  // digits one by one
  ASSERT_TRUE(smollm.ok()) << smollm.status().message();
  EXPECT_THAT(ids(**smollm, "ab11"), ElementsAre(4, 3, 3));
  const auto llama3 = load(byte_level("llama-bpe"));
  ASSERT_TRUE(llama3.ok()) << llama3.status().message();
  EXPECT_THAT((*llama3)->prompt_prefix(), ElementsAre(0));
}

TEST(GgufTokenizer, AddBosTokenOfTheFileDecides) {
  GgufBuilder with = byte_level("gpt-2"), without = byte_level("llama-bpe");
  with.add("tokenizer.ggml.add_bos_token", true);
  without.add("tokenizer.ggml.add_bos_token", false);
  EXPECT_THAT(load(with).value()->prompt_prefix(), ElementsAre(0));
  EXPECT_TRUE(load(without).value()->prompt_prefix().empty());
}

GgufBuilder sentencepiece() {
  GgufBuilder builder;
  builder.add("tokenizer.ggml.model", "llama");
  builder.add_array<std::string>("tokenizer.ggml.tokens", {"<unk>", "<s>", "<0x21>", "\u2581", "a",
                                                           "b", "c", "ab", "bc", "\u2581a", "abc"});
  builder.add_array<float>("tokenizer.ggml.scores", {0, 0, 0, -9, -7, -8, -10, -3, -2, -4, -1});
  builder.add_array<int32_t>("tokenizer.ggml.token_type", {2, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1});
  builder.add("tokenizer.ggml.bos_token_id", uint32_t{1});
  return builder;
}

// "bc" has the better score than "ab" and "_a", and "a" + "bc" is a piece.
TEST(GgufTokenizer, SentencePieceMergesTheBestScoreFirst) {
  const auto tokenizer = load(sentencepiece());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_THAT(ids(**tokenizer, "abc"), ElementsAre(3, 10));
  EXPECT_THAT(ids(**tokenizer, "a!"), ElementsAre(9, 2));  // a byte for what has no piece
  EXPECT_EQ((*tokenizer)->decode(ids(**tokenizer, "abc a"), DecodeSpecials::kSkip), "abc a");
  EXPECT_THAT((*tokenizer)->prompt_prefix(), ElementsAre(1));
  GgufBuilder bare = sentencepiece();
  bare.add("tokenizer.ggml.add_space_prefix", false);
  EXPECT_THAT(ids(*load(bare).value(), "abc"), ElementsAre(10));
}

struct BadCase {
  std::string name;
  GgufBuilder builder;
  StatusCode code;
  std::string word;
};

TEST(GgufTokenizer, RefusesWhatItWouldHaveToGuess) {
  std::vector<BadCase> cases;
  cases.push_back({"pre", byte_level("viking"), StatusCode::kUnsupported, "\"viking\""});
  GgufBuilder model;
  model.add("tokenizer.ggml.model", "bert").add_array<std::string>("tokenizer.ggml.tokens", {"a"});
  cases.push_back({"model", model, StatusCode::kUnsupported, "\"bert\""});
  GgufBuilder merges;
  merges.add("tokenizer.ggml.model", "gpt2").add("tokenizer.ggml.pre", "gpt-2");
  merges.add_array<std::string>("tokenizer.ggml.tokens", {"a"});
  cases.push_back({"merges", merges, StatusCode::kCorrupt, "tokenizer.ggml.merges"});
  GgufBuilder types;
  types.add("tokenizer.ggml.model", "gpt2").add_array<std::string>("tokenizer.ggml.tokens", {"a"});
  types.add_array<int32_t>("tokenizer.ggml.token_type", {1, 1});
  cases.push_back({"types", types, StatusCode::kCorrupt, "has 2 entries"});
  GgufBuilder id = byte_level("gpt-2");
  id.add("tokenizer.ggml.eos_token_id", uint32_t{8});
  cases.push_back({"id", id, StatusCode::kCorrupt, "8 is no token; there are 8"});
  GgufBuilder end = byte_level("gpt-2");
  end.add("tokenizer.ggml.add_eos_token", true);
  cases.push_back({"eos", end, StatusCode::kUnsupported, "add_eos_token"});
  for (const BadCase& bad : cases) {
    const Status status = load(bad.builder).status();
    EXPECT_EQ(status.code(), bad.code) << bad.name;
    EXPECT_THAT(status.message(), HasSubstr(bad.word));
    EXPECT_THAT(status.message(), HasSubstr("m.gguf"));
  }
}

}  // namespace
}  // namespace nibble
