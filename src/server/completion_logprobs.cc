#include "server/completion_logprobs.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "text/detokenizer.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

std::string label(const Tokenizer& tokenizer, int32_t token) {
  const std::string& bytes = tokenizer.token_bytes(token);
  if (utf8_valid(bytes)) {
    return bytes;
  }
  std::string out = "bytes:";
  for (const char byte : bytes) {
    out += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  }
  return out;
}

size_t at_most(int count, const std::vector<TokenLogprob>& top) {
  return std::min(top.size(), static_cast<size_t>(std::max(count, 0)));
}

Json ranked(const Tokenizer& tokenizer, const TokenLogprob& token, int64_t rank) {
  return Json::object({{"logprob", static_cast<double>(token.logprob)},
                       {"rank", rank},
                       {"decoded_token", tokenizer.token_bytes(token.token)}});
}

}  // namespace

void CompletionLogprobs::add(int32_t token, int64_t offset) {
  tokens_.emplace_back(label(tokenizer_, token));
  offsets_.emplace_back(offset);
}

void CompletionLogprobs::add_score(float logprob, const std::vector<TokenLogprob>& top) {
  JsonObject shown;
  for (size_t i = 0; i < at_most(count_, top); ++i) {
    shown.set(label(tokenizer_, top[i].token), static_cast<double>(top[i].logprob));
  }
  values_.emplace_back(static_cast<double>(logprob));
  tops_.emplace_back(std::move(shown));
}

void CompletionLogprobs::add_prompt(const Choice& choice) {
  Detokenizer text(tokenizer_, DecodeSpecials::kSkip);
  int64_t offset = 0;
  for (size_t i = 0; i < choice.prompt.size() && count_ >= 0; ++i) {
    add(choice.prompt[i], offset);
    offset += utf8_length(text.push(choice.prompt[i]));
    if (i == 0) {
      values_.emplace_back();
      tops_.emplace_back();
    } else {
      const ScoredToken& scored = choice.prompt_logprobs.at(i - 1);
      add_score(scored.logprob, scored.top_logprobs);
    }
  }
}

void CompletionLogprobs::add_answer(const Choice& choice) {
  for (const TokenEntry& entry : choice.entries) {
    add(entry.event.token, entry.text_offset);
    add_score(entry.event.logprob, entry.event.top_logprobs);
  }
}

Json CompletionLogprobs::json() {
  if (count_ < 0) {
    return {};
  }
  return Json::object({{"tokens", std::move(tokens_)},
                       {"token_logprobs", std::move(values_)},
                       {"top_logprobs", std::move(tops_)},
                       {"text_offset", std::move(offsets_)}});
}

Json prompt_logprobs_json(const Choice& choice, const Tokenizer& tokenizer, int count) {
  JsonArray list = {Json()};
  for (const ScoredToken& scored : choice.prompt_logprobs) {
    JsonObject tokens;
    tokens.append(std::to_string(scored.token),
                  ranked(tokenizer, {scored.token, scored.logprob}, scored.rank));
    for (size_t i = 0; i < at_most(count, scored.top_logprobs); ++i) {
      const TokenLogprob& other = scored.top_logprobs[i];
      if (other.token != scored.token) {
        tokens.append(std::to_string(other.token),
                      ranked(tokenizer, other, static_cast<int64_t>(i) + 1));
      }
    }
    list.emplace_back(std::move(tokens));
  }
  return list;
}

}  // namespace nibble
