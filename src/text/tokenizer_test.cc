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
  EXPECT_THAT(tokenizer->encode_prompt(text).value(),
              ElementsAre(0, 813, 313, 264, 1054, 283, 346, 288, 1691, 803, 17, 283, 266, 3311, 378,
                          2213, 313, 356, 872, 566, 19, 204, 204, 7));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode_prompt(text).value(), DecodeSpecials::kSkip), text);
}

TEST(Tokenizer, CharacterLevelJsonWithByteFallback) {
  const auto tokenizer = test::must(tokenizer_from_json(character_level_json(), {}));
  EXPECT_THAT(tokenizer->encode("ab a", SpecialTokens::kParse).value(), ElementsAre(5, 4, 5));
  EXPECT_THAT(tokenizer->encode_prompt("é").value(), ElementsAre(1, 2, 7 + 0xC3, 7 + 0xA9));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode_prompt("ab é  b").value(), DecodeSpecials::kSkip),
            "ab é  b");
  EXPECT_THAT(tokenizer->encode("<s>a", SpecialTokens::kParse).value(), ElementsAre(1, 5));
  EXPECT_EQ(tokenizer->encode("<s>a", SpecialTokens::kPlain).value().front(), 2);
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
    const auto take = [&](std::string_view part) {
      out += fmt::format("[{}]", part);
      return Status();
    };
    EXPECT_TRUE(
        matcher.split(text, mode, take, [&](int32_t id) { out += std::to_string(id); }).ok());
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
      const auto ids = tokenizer->encode(word, SpecialTokens::kParse).value();
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
    const auto ids = tokenizer->encode(text, SpecialTokens::kParse).value();
    EXPECT_EQ(tokenizer->decode(ids, DecodeSpecials::kKeep), text);
  }
}

TEST(TokenizerErrors, AddedTokensThatContradictTheVocabulary) {
  const auto load = [](std::string_view added, const std::vector<AddedToken>& of_config) {
    const std::string json = fmt::format(
        R"({{"pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false}},
            "added_tokens": [{}],
            "model": {{"type": "BPE", "vocab": {{"a": 0, "b": 1, "Ġ": 2, "ĠĠ": 3}},
                       "merges": ["Ġ Ġ"]}}}})",
        added);
    return tokenizer_from_json(json, {.added_tokens = of_config}, "m/tokenizer.json").status();
  };
  const auto message = [&](std::string_view added, const std::vector<AddedToken>& of_config) {
    const Status status = load(added, of_config);
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << added;
    return status.message();
  };
  const std::string_view fresh = R"({"id": 4, "content": "<s>", "special": true})";
  const AddedToken same{.id = 4, .content = "<s>", .special = true};
  // What real files do: the same in every list, names or texts, texts that pieces spell otherwise.
  EXPECT_TRUE(load(fresh, {same}).ok());
  EXPECT_TRUE(load(R"({"id": 1, "content": "b"})", {{.id = 1, .content = "b"}}).ok());
  EXPECT_TRUE(load(R"({"id": 3, "content": "  "})", {{.id = 3, .content = "  "}}).ok());
  EXPECT_TRUE(load(R"({"id": 4, "content": "  "})", {}).ok());
  EXPECT_THAT(message(R"({"id": 1, "content": "<s>"})", {}),
              HasSubstr("m/tokenizer.json: added_tokens[0]: added token '<s>' has the id 1, which "
                        "'b' has already"));
  EXPECT_THAT(message(R"({"id": 4, "content": "b"})", {}),
              HasSubstr("added token 'b' has the id 4, but it has the id 1 already"));
  EXPECT_THAT(message(fresh, {{.id = 4, .content = "<t>"}}),
              HasSubstr("tokenizer_config.json: field added_tokens_decoder: added token '<t>' has "
                        "the id 4, which '<s>' has already"));
  EXPECT_THAT(message(fresh, {{.id = 5, .content = "<s>"}}),
              HasSubstr("added token '<s>' has the id 5, but it has the id 4 already"));
  EXPECT_THAT(message(R"({"id": 3, "content": "  "}, {"id": 4, "content": "  "})", {}),
              HasSubstr("added token '  ' has two ids, 3 and 4"));
  std::string ranks;
  for (int byte = 0; byte < 256; ++byte) {
    const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    ranks += fmt::format("{}{}== {}\n", digits[byte >> 2], digits[(byte & 3) << 4], byte);
  }
  const auto of_ranks = [&](const AddedToken& token) {
    return tokenizer_from_tiktoken(ranks, ".", {.added_tokens = {token}}, "t.tiktoken").status();
  };
  EXPECT_TRUE(of_ranks({.id = 256, .content = "<s>"}).ok());
  EXPECT_EQ(of_ranks({.id = 255, .content = "<s>"}).code(), StatusCode::kCorrupt);
  EXPECT_EQ(of_ranks({.id = 256, .content = "a"}).code(), StatusCode::kCorrupt);
}

// Byte-level, cut by a pattern whose steps double with every 'a' that has no 'b' after it.
Result<std::unique_ptr<Tokenizer>> tokenizer_cut_by(std::string_view pre_tokenizer,
                                                    std::string_view normalizer = "null") {
  const std::string json = fmt::format(R"({{"pre_tokenizer": {}, "normalizer": {}, "added_tokens": [
          {{"id": 2, "content": "<s>", "special": true}}],
          "model": {{"type": "BPE", "vocab": {{"a": 0, "b": 1}}, "merges": []}}}})",
                                       pre_tokenizer, normalizer);
  return tokenizer_from_json(json, {}, "m/tokenizer.json");
}

TEST(TokenizerErrors, APatternThatGivesUpIsAnErrorWithItsPlace) {
  const std::string split =
      R"({"type": "Split", "pattern": {"Regex": "(?:a+)+b|."}, "behavior": "Isolated"})";
  const std::string byte_level =
      R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})";
  const std::string steps =
      R"({"type": "Sequence", "pretokenizers": [)" + split + "," + split + "," + byte_level + "]}";
  const std::string text = "b<s>aab" + std::string(40, 'a');
  for (const SpecialTokens mode : {SpecialTokens::kParse, SpecialTokens::kPlain}) {
    const auto ids = test::must(tokenizer_cut_by(steps))->encode(text, mode);
    EXPECT_EQ(ids.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(ids.status().message(),
                HasSubstr("m/tokenizer.json: pre_tokenizer.pretokenizers[0]: field pattern"));
    EXPECT_THAT(ids.status().message(), HasSubstr("near byte 7 of the text (match limit"));
  }
  EXPECT_FALSE(test::must(tokenizer_cut_by(steps))->encode_prompt(text).ok());
  EXPECT_THAT(test::must(tokenizer_cut_by(steps))->encode_prompt("aab").value(),
              ElementsAre(0, 0, 1));
  for (const char* behavior : {"Removed", "MergedWithNext", "Contiguous"}) {
    std::string other = split;
    other.replace(other.find("Isolated"), 8, behavior);
    EXPECT_FALSE(test::must(tokenizer_cut_by(other))->encode_prompt(text).ok()) << behavior;
  }
  const std::string replace =
      R"({"type": "Replace", "pattern": {"Regex": "(?:a+)+b|x"}, "content": "b"})";
  const auto normalizing = test::must(tokenizer_cut_by("null", replace));
  EXPECT_THAT(normalizing->encode_prompt("aab").value(), ElementsAre(1));
  EXPECT_THAT(normalizing->encode_prompt(text).status().message(),
              HasSubstr("m/tokenizer.json: normalizer: field pattern"));
}

TEST(TokenizerErrors, PublishedPatternsDoNotGiveUp) {
  // More than fits most contexts, in each of the ways that make a pattern look far ahead.
  constexpr size_t kBytes = size_t{4} << 20;
  for (const char* name : {"gpt2", "llama3", "qwen2", "o200k", "kimi_k2"}) {
    const SplitStep step{.pattern = Regex::compile(known_split_pattern(name), name).value()};
    for (const char* unit : {"a", "A", " ", "\n", " \t", "7", "!", "\u6f22", "\u3042", "\u0301"}) {
      std::string text;
      while (text.size() < kBytes) text += unit;
      size_t seen = 0;
      const Status status =
          split_text(step, {text}, [&](std::string_view word) { seen += word.size(); });
      EXPECT_TRUE(status.ok()) << status.message() << " for " << unit;
      EXPECT_EQ(seen, text.size());
    }
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
  const auto ids = tokenizer->encode("ab", SpecialTokens::kParse).value();
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
