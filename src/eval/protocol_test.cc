#include "eval/protocol.h"

#include <memory>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "eval/wikitext.h"

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kBos = 256;

/// Bytes are tokens; prompts begin with token 256 where the tokenizer has a BOS.
std::unique_ptr<Tokenizer> byte_tokenizer(bool bos) {
  TokenizerParts parts;
  BpeVocabulary vocabulary;
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary.pieces.emplace_back(1, static_cast<char>(byte));
  }
  parts.token_bytes = vocabulary.pieces;
  std::vector<uint32_t> ranks(256);
  std::iota(ranks.begin(), ranks.end(), 0U);
  parts.model = BpeModel::from_ranks(std::move(vocabulary), std::move(ranks), {});
  if (bos) {
    parts.token_bytes.emplace_back("<s>");
    parts.bos_id = kBos;
    parts.prompt_prefix = {kBos};
  }
  return Tokenizer::create(std::move(parts)).value();
}

EvalText plan(std::string_view text, Protocol protocol, int64_t window, bool bos = true) {
  return plan_windows(text, *byte_tokenizer(bos), protocol, window).value();
}

std::vector<std::string> texts_of(const EvalText& text) {
  std::vector<std::string> out;
  for (const EvalWindow& window : text.windows) {
    std::string& one = out.emplace_back();
    for (const int32_t token : window.tokens) {
      one += token == kBos ? '^' : static_cast<char>(token);
    }
  }
  return out;
}

std::vector<int64_t> first_scored(const EvalText& text) {
  std::vector<int64_t> out;
  for (const EvalWindow& window : text.windows) {
    out.push_back(window.first_scored);
  }
  return out;
}

TEST(Protocol, OursCutsThePlainTextAndDropsTheRest) {
  const EvalText text = plan("abcdefgh", Protocol::kOurs, 3);
  EXPECT_THAT(texts_of(text), ElementsAre("abc", "def"));
  EXPECT_THAT(first_scored(text), ElementsAre(1, 1));
  EXPECT_EQ(text.tokens, 8);
  EXPECT_EQ(text.bytes, 8);
  EXPECT_EQ(text.scored(), 4);
}

TEST(Protocol, OursTakesAShortTextAsOneWindow) {
  EXPECT_THAT(texts_of(plan("abc", Protocol::kOurs, 100)), ElementsAre("abc"));
}

TEST(Protocol, GptqJoinsLinesAndPutsBosInFront) {
  const EvalText text = plan("a\n \nb\n", Protocol::kGptq, 4);  // a\n, "", b\n with \n\n between
  EXPECT_THAT(texts_of(text), ElementsAre("^a\n\n", "\n\n\nb"));
  EXPECT_EQ(text.tokens, 9);
  EXPECT_THAT(texts_of(plan("a\n \nb\n", Protocol::kGptq, 4, false)),
              ElementsAre("a\n\n\n", "\n\nb\n"));
}

// llama.cpp: the last newline goes, BOS stands in front of the text and replaces the first token of
// each window, and the second half is scored but for what its first token predicts.
TEST(Protocol, LlamaCppScoresSecondHalves) {
  const EvalText text = plan("abcdefghijk\n", Protocol::kLlamaCpp, 6);
  EXPECT_THAT(texts_of(text), ElementsAre("^abcde", "^ghijk"));
  EXPECT_THAT(first_scored(text), ElementsAre(4, 4));
  EXPECT_EQ(text.scored(), 4);
  EXPECT_THAT(texts_of(plan("abcdefghijkl", Protocol::kLlamaCpp, 6, false)),
              ElementsAre("abcdef", "ghijkl"));
}

// The example in the documentation of lm-eval's loglikelihood_rolling(): ten tokens, context 4.
// This tokenizer puts a BOS of its own in front, which lm-eval scores, too.
TEST(Protocol, LmEvalScoresEveryTokenOnce) {
  EvalText text = plan("0123456789", Protocol::kLmEval, 4);
  EXPECT_THAT(texts_of(text), ElementsAre("^^012", "23456", "56789"));
  EXPECT_THAT(first_scored(text), ElementsAre(1, 1, 2));
  EXPECT_EQ(text.scored(), 11);
  text = plan(" = A = \n a\n = B = \n b\n", Protocol::kLmEval, 100);
  EXPECT_THAT(texts_of(text), ElementsAre("^^ = A =\na\n", "^^ = B =\nb\n"));
}

TEST(Protocol, RefusesWhatIsTooShort) {
  const auto tokenizer = byte_tokenizer(true);
  const auto failure = [&](std::string_view text, Protocol protocol, int64_t window) {
    const Status status = plan_windows(text, *tokenizer, protocol, window).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_THAT(failure("a", Protocol::kOurs, 4), HasSubstr("1 tokens"));
  EXPECT_THAT(failure("", Protocol::kOurs, 4), HasSubstr("0 tokens"));
  EXPECT_THAT(failure("ab", Protocol::kGptq, 4), HasSubstr("3 tokens, but 4"));
  EXPECT_THAT(failure("abcdef", Protocol::kLlamaCpp, 4), HasSubstr("7 tokens, but 8"));
  EXPECT_THAT(failure("abcdef", Protocol::kLlamaCpp, 2), HasSubstr("--window 2"));
  EXPECT_THAT(failure(" \n ", Protocol::kLmEval, 4), HasSubstr("0 tokens"));
  EXPECT_THAT(plan_windows("ab", *byte_tokenizer(false), Protocol::kLmEval, 4).status().message(),
              HasSubstr("BOS"));
}

TEST(Protocol, NamesAreRead) {
  for (const std::string& name : protocol_names()) {
    EXPECT_EQ(protocol_name(parse_protocol(name).value()), name);
  }
  EXPECT_EQ(parse_protocol("GPTQ").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(default_window(Protocol::kGptq, 1024), 1024);
  EXPECT_EQ(default_window(Protocol::kGptq, 8192), 2048);
  EXPECT_EQ(default_window(Protocol::kOurs, 8192), 512);
  EXPECT_EQ(default_window(Protocol::kLmEval, 8192), 8192);
}

TEST(WikiText, PagesBeginAtTitles) {
  const std::string text = " \n = A b = \n \n x\n = = Part = = \n y\n = C = \n z";
  EXPECT_THAT(wikitext_pages(text),
              ElementsAre(" \n = A b = \n \n x\n = = Part = = \n y\n", " = C = \n z"));
  EXPECT_THAT(wikitext_pages("no title"), ElementsAre("no title"));
  EXPECT_TRUE(wikitext_pages(" \n\u00a0\n").empty());
}

// Made by lm-eval's wikitext_detokenizer() (lm_eval 0.4.13).
TEST(WikiText, DetokenizesAsLmEvalDoes) {
  EXPECT_EQ(detokenized_wikitext(" He said \" hello \" ( loudly ) , and 1 @,@ 000 @-@ fold ; "
                                 "it 's N . \n = = Head = = \n [ 1 ] { x } ' a ' 5 @.@ 2 ! "),
            " He said \"hello\" (loudly), and 1,000-fold; it's N.\n== Head ==\n[1] {x}' a ' 5.2! ");
}

// len(re.split(r"\s+", page)) in Python.
TEST(WikiText, CountsWordsAsLmEvalDoes) {
  EXPECT_EQ(words_of(""), 1);
  EXPECT_EQ(words_of("a b"), 2);
  EXPECT_EQ(words_of(" a \n b "), 4);
  EXPECT_EQ(words_of("a\u2003\u00a0b"), 2);
}

}  // namespace
}  // namespace nibble
