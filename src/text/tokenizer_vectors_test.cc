// Published text -> ids cases, produced by the models' reference tokenizers.
#include <cstdlib>
#include <sstream>

#include <gtest/gtest.h>

#include "base/json.h"
#include "gguf/file.h"
#include "text/gguf_tokenizer.h"
#include "text/tokenizer_test_data.h"

namespace nibble {
namespace {

// A file below tokenizers/ of the shared data, "" if absent.
std::string read_shared(const std::string& name) {
  const char* shared = std::getenv("NIBBLE_SHARED");
  return test::read_maybe_packed(std::string(shared == nullptr ? "../shared" : shared) +
                                 "/data/tokenizers/" + name);
}

// Runs every case of a .jsonl text; each has text, ids and specials.
void check_vectors(const Tokenizer& tokenizer, const std::string& jsonl, int expected_cases) {
  std::istringstream lines(jsonl);
  int cases = 0;
  for (std::string line; std::getline(lines, line);) {
    Result<Json> parsed = Json::parse(line);
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    const std::string& text = parsed->find("text")->as_string();
    std::vector<int32_t> expected;
    for (const Json& id : parsed->find("ids")->as_array()) {
      expected.push_back(static_cast<int32_t>(id.as_int()));
    }
    const auto mode =
        parsed->find("specials")->as_bool() ? SpecialTokens::kParse : SpecialTokens::kPlain;
    EXPECT_EQ(tokenizer.encode(text, mode).value(), expected) << "case " << cases << ": " << text;
    // An NFC normalizer rewrites text, so only what it leaves alone comes back.
    const std::string decoded = tokenizer.decode(expected, DecodeSpecials::kKeep);
    EXPECT_EQ(tokenizer.encode(decoded, mode).value(), expected) << "decoded case " << cases;
    ++cases;
  }
  EXPECT_EQ(cases, expected_cases);
}

TEST(TokenizerVectors, Gpt2) {
  const auto tokenizer = test::gpt2();
  EXPECT_EQ(tokenizer->vocab_size(), 50257);
  check_vectors(*tokenizer, test::read_maybe_packed("tests/data/tokenizers/gpt2_vectors.jsonl"),
                141);
  check_vectors(*tokenizer, test::read_maybe_packed("tests/data/tokenizers/llamacpp_gpt2.jsonl"),
                47);
}

TEST(TokenizerVectors, Qwen2) {
  const auto tokenizer = test::qwen2();
  check_vectors(*tokenizer, test::read_maybe_packed("tests/data/tokenizers/llamacpp_qwen2.jsonl"),
                47);
}

struct SharedCase {
  const char* name;
  const char* vocabulary;  // below tokenizers/
  const char* pattern;     // of a tiktoken file; "" for SentencePiece
  std::vector<AddedToken> specials;
  std::vector<std::pair<const char*, int>> vectors;  // file below vectors/, cases
};

void PrintTo(const SharedCase& shared, std::ostream* out) { *out << shared.name; }

class SharedVectors : public testing::TestWithParam<SharedCase> {};

TEST_P(SharedVectors, AllCases) {
  const SharedCase& param = GetParam();
  const std::string content = read_shared(param.vocabulary);
  if (content.empty()) {
    GTEST_SKIP() << "shared data has no tokenizers/" << param.vocabulary
                 << "; set NIBBLE_SHARED to its folder";
  }
  TokenizerConfig config;
  config.added_tokens = param.specials;
  const auto tokenizer = test::must(
      *param.pattern == '\0' ? tokenizer_from_sentencepiece(content, config)
                             : tokenizer_from_tiktoken(content, known_split_pattern(param.pattern),
                                                       config, param.vocabulary));
  for (const auto& [file, cases] : param.vectors) {
    SCOPED_TRACE(file);
    check_vectors(*tokenizer, read_shared(std::string("vectors/") + file), cases);
  }
}

// The same vocabulary as Llama 2's tokenizer.model, as GGUF stores it.
TEST(TokenizerVectors, Llama2OfGguf) {
  const std::string content = read_shared("gguf/ggml-vocab-llama-spm.gguf");
  if (content.empty()) {
    GTEST_SKIP() << "shared data has no tokenizers/gguf; set NIBBLE_SHARED to its folder";
  }
  const auto parsed = gguf::parse_gguf(std::as_bytes(std::span(content)), "vocab.gguf");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  const auto files = gguf_tokenizer_files(parsed->metadata);
  ASSERT_TRUE(files.ok()) << files.status().message();
  const auto config = TokenizerConfig::parse(files->config.dump(), "vocab.gguf");
  const auto tokenizer =
      test::must(tokenizer_from_parsed(files->tokenizer, config.value(), "vocab.gguf"));
  check_vectors(*tokenizer, read_shared("vectors/llama2.jsonl"), 141);
  check_vectors(*tokenizer, read_shared("vectors/llamacpp_llama2.jsonl"), 47);
  EXPECT_EQ(tokenizer->prompt_prefix(), std::vector<int32_t>{1});
}

const std::vector<AddedToken> kLlama3Specials = {test::special_token(128000, "<|begin_of_text|>"),
                                                 test::special_token(128001, "<|end_of_text|>"),
                                                 test::special_token(128009, "<|eot_id|>")};
const std::vector<AddedToken> kO200kSpecials = {test::special_token(199998, "<|startoftext|>"),
                                                test::special_token(199999, "<|endoftext|>")};
const std::vector<AddedToken> kKimiSpecials = {test::special_token(163584, "[BOS]"),
                                               test::special_token(163585, "[EOS]"),
                                               test::special_token(163586, "<|im_end|>")};

INSTANTIATE_TEST_SUITE_P(
    Published,
    SharedVectors,
    testing::Values(
        SharedCase{
            "llama2",
            "llama2/tokenizer.model",
            "",
            {},
            {{"llama2.jsonl", 141}, {"llamacpp_llama2.jsonl", 47}, {"llamacpp_phi3.jsonl", 47}}},
        SharedCase{"mistral_v1", "mistral/v1.model", "", {}, {{"mistral_v1.jsonl", 141}}},
        SharedCase{"mistral_v3", "mistral/v3.model", "", {}, {{"mistral_v3.jsonl", 141}}},
        SharedCase{"llama3",
                   "llama3/tokenizer.model",
                   "llama3",
                   kLlama3Specials,
                   {{"llama3.jsonl", 141}, {"llamacpp_llama3.jsonl", 47}}},
        SharedCase{"o200k",
                   "o200k/o200k_base.tiktoken",
                   "o200k",
                   kO200kSpecials,
                   {{"o200k_base.jsonl", 141}, {"gpt_oss.jsonl", 141}}},
        SharedCase{"kimi_k2",
                   "kimi_k2/tiktoken.model",
                   "kimi_k2",
                   kKimiSpecials,
                   {{"kimi_k2.jsonl", 141}}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace nibble
