#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include <fmt/format.h>

#include "server/schema_routes.h"

namespace nibble {
namespace {

constexpr size_t kMaxBadWords = 256;
constexpr size_t kLongestSalt = 1024;       // bytes
constexpr double kShortestTimeout = 0.001;  // seconds
constexpr double kLongestTimeout = 1e6;
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

void read_prompt_logprobs(FieldReader& fields, GenerationRequest& request) {
  if (fields.find("prompt_logprobs") == nullptr) {
    return;
  }
  int64_t count = 0;
  fields.integer("prompt_logprobs", 0, kMaxLogprobs, count);
  request.prompt_logprobs = static_cast<int>(count);
  if (request.stream) {
    fields.fail("prompt_logprobs", "prompt_logprobs: not available when stream is true");
  }
}

void read_bad_words(FieldReader& fields, GenerationRequest& request) {
  const auto blank = [](const std::string& word) {
    return word.find_first_not_of(' ') == std::string::npos;
  };
  if (!fields.texts("bad_words", request.bad_words)) {
    fields.fail("bad_words", "bad_words: expected an array of strings");
  } else if (std::ranges::any_of(request.bad_words, blank)) {
    fields.fail("bad_words", "bad_words: a word must have more than blanks");
  } else if (request.bad_words.size() > kMaxBadWords) {
    fields.fail("bad_words", fmt::format("bad_words: at most {} words, got {}", kMaxBadWords,
                                         request.bad_words.size()));
  }
}

}  // namespace

void read_truncation(FieldReader& fields, std::optional<int64_t>& target) {
  constexpr std::string_view kKey = "truncate_prompt_tokens";
  if (fields.find(kKey) == nullptr) {
    return;
  }
  int64_t count = 1;
  fields.integer(kKey, -1, kMostTokens, count);
  if (count == 0) {
    fields.fail(kKey, "truncate_prompt_tokens: must be -1 (all that fit) or at least 1");
  }
  target = count;
}

void read_scheduling(FieldReader& fields, std::string& cache_salt, int64_t& priority) {
  if (fields.find("cache_salt") != nullptr) {
    fields.text("cache_salt", cache_salt);
    if (cache_salt.empty() || cache_salt.size() > kLongestSalt) {
      fields.fail("cache_salt",
                  fmt::format("cache_salt: must have 1 to {} bytes; leave it out to share the "
                              "prefix cache with others",
                              kLongestSalt));
    }
  }
  fields.integer("priority", std::numeric_limits<int32_t>::min(), kMostTokens, priority);
}

void read_engine_fields(FieldReader& fields, GenerationRequest& request) {
  read_prompt_logprobs(fields, request);
  read_bad_words(fields, request);
  fields.token_ids("allowed_token_ids", request.sampling.allowed_tokens);
  if (fields.find("allowed_token_ids") != nullptr && request.sampling.allowed_tokens.empty()) {
    fields.fail("allowed_token_ids", "allowed_token_ids: must not be empty; leave it out");
  }
  fields.boolean("return_token_ids", request.return_token_ids);
  read_truncation(fields, request.truncate_prompt_tokens);
  if (fields.find("thinking_token_budget") != nullptr) {
    fields.integer("thinking_token_budget", 0, kMostTokens, request.thought_tokens.emplace());
  }
  read_scheduling(fields, request.cache_salt, request.priority);
  if (fields.find("timeout") != nullptr) {
    fields.number("timeout", kShortestTimeout, kLongestTimeout, request.timeout_s.emplace());
  }
  bool keep_stop = false;  // SGLang's name
  fields.boolean("no_stop_trim", keep_stop);
  request.include_stop = request.include_stop || keep_stop;
}

}  // namespace nibble
