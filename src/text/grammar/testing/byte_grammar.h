#pragma once

#include <array>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "text/grammar/grammar.h"
#include "text/grammar/json_schema_grammar.h"
#include "text/tokenizer.h"

namespace nibble {

constexpr int32_t kEndOfBytes = 256;

/// Special tokens that mark calls, of Mistral, Kimi-K2, DeepSeek and gpt-oss.
inline std::vector<std::string> call_marks() {
  return {"[TOOL_CALLS]",
          "[ARGS]",
          "<|tool_calls_section_begin|>",
          "<|tool_calls_section_end|>",
          "<|tool_call_begin|>",
          "<|tool_call_argument_begin|>",
          "<|tool_call_end|>",
          "<｜tool▁calls▁begin｜>",
          "<｜tool▁calls▁end｜>",
          "<｜tool▁call▁begin｜>",
          "<｜tool▁sep｜>",
          "<｜tool▁call▁end｜>",
          "<|channel|>",
          "<|message|>",
          "<|end|>",
          "<|start|>",
          "<|constrain|>"};
}

/// A token for each byte, <end>, then `specials` and the tokens of `words`.
inline std::unique_ptr<Tokenizer> byte_tokens(const std::vector<std::string>& specials = {},
                                              const std::vector<std::string>& words = {}) {
  TokenizerParts parts;
  BpeVocabulary vocabulary;
  for (int byte = 0; byte < kEndOfBytes; ++byte) {
    vocabulary.pieces.emplace_back(1, static_cast<char>(byte));
  }
  vocabulary.pieces.emplace_back("");
  for (size_t i = 0; i < specials.size(); ++i) {
    vocabulary.pieces.emplace_back("");
  }
  vocabulary.pieces.insert(vocabulary.pieces.end(), words.begin(), words.end());
  parts.token_bytes = vocabulary.pieces;
  const auto add = [&](int32_t id, const std::string& name) {
    parts.token_bytes[static_cast<size_t>(id)] = name;
    parts.added_tokens.push_back({.id = id, .content = name, .special = true});
  };
  add(kEndOfBytes, "<end>");
  for (size_t i = 0; i < specials.size(); ++i) {
    add(kEndOfBytes + 1 + static_cast<int32_t>(i), specials[i]);
  }
  std::vector<uint32_t> ranks(vocabulary.pieces.size());
  std::iota(ranks.begin(), ranks.end(), 0U);
  parts.model = BpeModel::from_ranks(std::move(vocabulary), std::move(ranks), {});
  auto tokenizer = Tokenizer::create(std::move(parts));
  CHECK(tokenizer.ok());
  return std::move(tokenizer).value();
}

/// Grammars over byte tokens.
class ByteGrammars final {
 public:
  explicit ByteGrammars(const std::vector<std::string>& specials = {},
                        const std::vector<std::string>& words = {})
      : tokenizer_(byte_tokens(specials, words)),
        compiler_(*tokenizer_, tokenizer_->vocab_size(), std::array<int64_t, 1>{kEndOfBytes}) {}

  [[nodiscard]] const Tokenizer& tokenizer() const { return *tokenizer_; }
  [[nodiscard]] GrammarCompiler& compiler() { return compiler_; }

  /// Whether an answer may be these tokens and end after them.
  bool allows(const Grammar& grammar, const std::vector<int32_t>& tokens) {
    const auto answer = grammar.start();
    return follows(*answer, tokens);
  }
  bool follows(TokenConstraint& answer, std::vector<int32_t> tokens) {
    std::vector<uint32_t> mask(static_cast<size_t>(mask_words(tokenizer_->vocab_size())));
    tokens.push_back(kEndOfBytes);
    for (const int32_t token : tokens) {
      if (answer.fill(mask) && !mask_allows(mask, token)) {
        return false;
      }
      CHECK(answer.accept(token).ok());
    }
    return true;
  }
  /// The bytes of a text, with special tokens where it has their names.
  std::vector<int32_t> tokens(std::string_view text) const {
    auto out = tokenizer_->encode(text, SpecialTokens::kParse);
    CHECK(out.ok());
    return std::move(out).value();
  }
  bool allows(const Grammar& grammar, std::string_view text) {
    return allows(grammar, tokens(text));
  }

  Result<std::shared_ptr<const Grammar>> schema(std::string_view text) {
    const auto json = Json::parse(text);
    CHECK(json.ok());
    JsonSchemaGrammar rules;
    NIBBLE_ASSIGN_OR_RETURN(const std::string root, rules.add(*json));
    return compiler_.compile({.ebnf = rules.text() + "root ::= " + root + "\n",
                              .shortest_limit = rules.shortest_limit()});
  }

 private:
  std::unique_ptr<Tokenizer> tokenizer_;
  GrammarCompiler compiler_;
};

}  // namespace nibble
