#include "text/tokenizer.h"

#include <chrono>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/detokenizer.h"
#include "text/tokenizer_test_data.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A character-level vocabulary in the form of SentencePiece models, with BOS and byte tokens.
std::string character_level_json() {
  JsonArray merges = {"\u2581 a", "a b"};
  Json vocab = Json::object(
      {{"<unk>", 0}, {"<s>", 1}, {"\u2581", 2}, {"a", 3}, {"b", 4}, {"\u2581a", 5}, {"ab", 6}});
  for (int byte = 0; byte < 256; ++byte) vocab.set(fmt::format("<0x{:02X}>", byte), 7 + byte);
  return R"({"normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "▁"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    "pre_tokenizer": null,
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "added_tokens": [{"id": 1, "content": "<s>", "special": true}],
    "decoder": {"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
      {"type": "ByteFallback"}, {"type": "Fuse"},
      {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "merges": )" +
         Json(merges).dump() + R"(, "vocab": )" + vocab.dump() + "}}";
}

TEST(Tokenizer, StorytellerPromptAndGreedyText) {
  const auto tokenizer = test::must(Tokenizer::load("models/storyteller"));
  EXPECT_EQ(tokenizer->vocab_size(), 4096);
  EXPECT_EQ(tokenizer->bos_id(), 0);
  EXPECT_EQ(tokenizer->eos_token(), "<|end_of_text|>");
  EXPECT_EQ(tokenizer->eos_id(), 1);
  EXPECT_TRUE(tokenizer->is_special(4));
  EXPECT_FALSE(tokenizer->is_special(400));
  // Ids of the training script's own tokenizer.
  const std::string text =
      "It was a dark and stormy night, and the captain's watch was not yet over.\n\n\"";
  EXPECT_THAT(tokenizer->encode_prompt(text),
              ElementsAre(0, 813, 313, 264, 1054, 283, 346, 288, 1691, 803, 17, 283, 266, 3311, 378,
                          2213, 313, 356, 872, 566, 19, 204, 204, 7));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode_prompt(text), DecodeSpecials::kSkip), text);
}

TEST(Tokenizer, CharacterLevelJsonWithByteFallback) {
  const auto tokenizer = test::must(tokenizer_from_json(character_level_json(), {}));
  EXPECT_THAT(tokenizer->encode("ab a", SpecialTokens::kParse), ElementsAre(5, 4, 5));
  EXPECT_THAT(tokenizer->encode_prompt("é"), ElementsAre(1, 2, 7 + 0xC3, 7 + 0xA9));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode_prompt("ab é  b"), DecodeSpecials::kSkip),
            "ab é  b");
  EXPECT_THAT(tokenizer->encode("<s>a", SpecialTokens::kParse), ElementsAre(1, 5));
  EXPECT_EQ(tokenizer->encode("<s>a", SpecialTokens::kPlain).front(), 2);
}

TEST(Tokenizer, AddBosTokenOfTheConfigWins) {
  TokenizerConfig config;
  config.bos_token = "<s>";
  config.add_bos_token = false;
  EXPECT_TRUE(
      test::must(tokenizer_from_json(character_level_json(), config))->prompt_prefix().empty());
  config.add_bos_token = true;
  EXPECT_THAT(test::must(tokenizer_from_json(character_level_json(), config))->prompt_prefix(),
              ElementsAre(1));
  config.bos_token = "<absent>";
  EXPECT_THAT(tokenizer_from_json(character_level_json(), config).status().message(),
              HasSubstr("add_bos_token"));
}

TEST(Tokenizer, AddedTokensTakeTheLongestAndStripBlanks) {
  AddedTokenMatcher matcher;
  matcher.add({.id = 1, .content = "<a>"});
  matcher.add({.id = 2, .content = "<a>b", .lstrip = true, .rstrip = true});
  matcher.add({.id = 3, .content = "x", .single_word = true});
  matcher.add({.id = 4, .content = "!", .special = true});
  const auto run = [&](std::string_view text, SpecialTokens mode) {
    std::string out;
    matcher.split(
        text, mode, [&](std::string_view part) { out += fmt::format("[{}]", part); },
        [&](int32_t id) { out += std::to_string(id); });
    return out;
  };
  EXPECT_EQ(run("q <a>b  <a>c", SpecialTokens::kParse), "[q]21[c]");
  EXPECT_EQ(run("x xx !", SpecialTokens::kParse), "3[ xx ]4");
  EXPECT_EQ(run("x xx !", SpecialTokens::kPlain), "3[ xx !]");
}

TEST(Tokenizer, TimeOfLongWordsGrowsNoFasterThanTheirLength) {
  for (const auto& tokenizer :
       {test::gpt2(), test::must(tokenizer_from_json(character_level_json(), {}))}) {
    const auto seconds_for = [&](size_t length) {
      const std::string word(length, 'a');
      const auto start = std::chrono::steady_clock::now();
      const auto ids = tokenizer->encode(word, SpecialTokens::kParse);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      EXPECT_EQ(tokenizer->decode(ids, DecodeSpecials::kKeep), word);
      return seconds.count();
    };
    // Eight times the length takes eight times as long; quadratic merging, 64 times.
    const double shorter = seconds_for(size_t{1} << 17);
    EXPECT_LT(seconds_for(size_t{1} << 20), 30 * shorter);
  }
}

TEST(Tokenizer, RandomTextComesBack) {
  const auto tokenizer = test::gpt2();
  std::mt19937 random(7);
  const std::string_view alphabet[] = {"a", " ", "\n", "é", "漢", "😀", "1", "'s", "\t", "ß"};
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 40; ++i) text += alphabet[random() % std::size(alphabet)];
    const auto ids = tokenizer->encode(text, SpecialTokens::kParse);
    EXPECT_EQ(tokenizer->decode(ids, DecodeSpecials::kKeep), text);
  }
}

TEST(Detokenizer, NeverCutsACharacter) {
  const auto tokenizer = test::gpt2();
  // Single bytes as tokens are the finest split there is.
  const std::string text = "a😀漢字é👩‍🚀z";
  Detokenizer detokenizer(*tokenizer, DecodeSpecials::kKeep);
  std::string out;
  for (const char c : text) {
    const std::string piece =
        detokenizer.push(tokenizer->token_to_id(std::string_view(&c, 1)).value());
    EXPECT_TRUE(utf8_valid(piece));
    out += piece;
  }
  EXPECT_EQ(out, text);
  EXPECT_EQ(detokenizer.flush(), "");
}

TEST(Detokenizer, OnlyAWholeTextLosesItsFirstSpace) {
  const auto tokenizer = test::must(tokenizer_from_json(character_level_json(), {}));
  const auto ids = tokenizer->encode("ab", SpecialTokens::kParse);
  const auto text = [&](DecodeFrom from) {
    Detokenizer detokenizer(*tokenizer, DecodeSpecials::kSkip, from);
    std::string out;
    for (const int32_t id : ids) {
      out += detokenizer.push(id);
    }
    return out;
  };
  EXPECT_EQ(text(DecodeFrom::kTextStart), "ab");
  EXPECT_EQ(text(DecodeFrom::kContinuation), " ab");
}

TEST(Detokenizer, InvalidBytesBecomeReplacementCharacters) {
  const auto tokenizer = test::gpt2();
  const auto byte = [&](char c) { return tokenizer->token_to_id(std::string(1, c)).value(); };
  Detokenizer detokenizer(*tokenizer, DecodeSpecials::kKeep);
  EXPECT_EQ(detokenizer.push(byte('\xF0')), "");
  EXPECT_EQ(detokenizer.push(byte('\x9F')), "");
  EXPECT_EQ(detokenizer.push(byte('a')), "\uFFFDa");
  EXPECT_EQ(detokenizer.push(byte('\xE6')), "");
  EXPECT_EQ(detokenizer.flush(), "\uFFFD");
}

TEST(TokenizerErrors, NameFileAndField) {
  const auto message = [](std::string_view json) {
    return tokenizer_from_json(json, {}, "m/tokenizer.json").status().message();
  };
  EXPECT_THAT(message("{"), HasSubstr("m/tokenizer.json"));
  EXPECT_THAT(message("[]"), HasSubstr("field model"));
  EXPECT_THAT(message(R"({"model": {"type": "Unigram"}})"), HasSubstr("Unigram"));
  EXPECT_THAT(message(R"({"model": {"type": "BPE", "vocab": {"a": -1}}})"),
              HasSubstr("model.vocab"));
  EXPECT_THAT(message(R"({"model": {"type": "BPE", "vocab": {"a": 0}}})"),
              HasSubstr("model.merges"));
  EXPECT_THAT(message(R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}})"),
              HasSubstr("'aa'"));
  EXPECT_THAT(message(R"({"model": {"type": "BPE", "vocab": {}, "merges": []},
                         "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}})"),
              HasSubstr("pre_tokenizer: field pattern"));
  EXPECT_EQ(Tokenizer::load("tests/data/text").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(tokenizer_from_sentencepiece("\n\xFFgarbage", {}).status().code(),
            StatusCode::kCorrupt);
  EXPECT_THAT(tokenizer_from_tiktoken("IQ== x\n", "a", {}, "t.tiktoken").status().message(),
              HasSubstr("t.tiktoken: line 1"));
}

}  // namespace
}  // namespace nibble
