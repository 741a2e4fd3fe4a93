// Makes a grammar of the input: of a JSON schema, of a regular expression or of EBNF, as its first
// byte says, compiles it and walks through an answer: no crash, no leak, bounded time; where the
// schema was taken, a finished answer is JSON.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/grammar/ebnf_check.h"
#include "text/grammar/json_schema_grammar.h"
#include "text/grammar/regex_check.h"
#include "text/grammar/testing/byte_grammar.h"

namespace {

using nibble::GrammarText;

void check(bool holds) {
  if (!holds) {
    std::abort();
  }
}

/// The grammar's text; empty where the input is refused.
GrammarText text_of(uint8_t kind, std::string_view input) {
  if (kind % 3 == 0) {
    const auto json = nibble::Json::parse(input);
    nibble::JsonSchemaGrammar schema;
    const auto root = json.ok() ? schema.add(*json) : nibble::Result<std::string>(json.status());
    return root.ok() ? GrammarText{.ebnf = schema.text() + "root ::= " + *root + "\n",
                                   .shortest_limit = schema.shortest_limit()}
                     : GrammarText{};
  }
  if (kind % 3 == 1) {
    const auto whole = nibble::check_regex(input, nibble::RegexPlace::kText);
    return {.ebnf = whole.ok() ? "root ::= " + *whole : std::string()};
  }
  return {.ebnf = nibble::check_ebnf(input).ok() ? std::string(input) : std::string()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static nibble::ByteGrammars grammars({}, {"\"a", "ab\"", "\":", "12", "\\u00", "é"});
  if (size == 0) {
    return 0;
  }
  const GrammarText text = text_of(data[0], {reinterpret_cast<const char*>(data) + 1, size - 1});
  if (text.ebnf.empty()) {
    return 0;
  }
  const auto grammar = grammars.compiler().compile(text);
  if (!grammar.ok()) {
    return 0;
  }
  const auto answer = (*grammar)->start();
  const int64_t vocabulary = grammars.tokenizer().vocab_size();
  std::vector<uint32_t> mask(static_cast<size_t>(nibble::mask_words(vocabulary)));
  std::string said;
  uint32_t state = data[size - 1] + 1U;
  for (int step = 0; step < 64; ++step) {
    std::vector<int32_t> allowed;
    const bool some = answer->fill(mask);
    for (int32_t token = 0; token < vocabulary; ++token) {
      if (!some || nibble::mask_allows(mask, token)) {
        allowed.push_back(token);
      }
    }
    if (allowed.empty()) {  // a grammar that no text ends
      check(data[0] % 3 != 0 || text.shortest_limit == 0);
      return 0;
    }
    state = state * 1664525U + 1013904223U;
    const bool ends = some && nibble::mask_allows(mask, nibble::kEndOfBytes);
    const int32_t token = ends ? nibble::kEndOfBytes : allowed[(state >> 8) % allowed.size()];
    check(answer->accept(token).ok());
    if (ends) {
      check(data[0] % 3 != 0 || nibble::Json::parse(said).ok());
      return 0;
    }
    said += grammars.tokenizer().token_bytes(token);
  }
  return 0;
}
