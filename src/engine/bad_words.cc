#include "engine/bad_words.h"

#include <algorithm>
#include <span>

namespace nibble {

Status check_bad_words(const Request& request, int64_t vocab_size) {
  for (const std::vector<int32_t>& word : request.bad_words) {
    if (word.empty()) {
      return make_error(StatusCode::kInvalidArgument, "bad_words has a word without tokens");
    }
    for (const int32_t token : word) {
      if (token < 0 || token >= vocab_size) {
        return make_error(StatusCode::kInvalidArgument,
                          "bad_words has token {}, but the vocabulary has {} tokens", token,
                          vocab_size);
      }
    }
  }
  return {};
}

bool watches_answer(const Request& request) {
  return std::ranges::any_of(request.bad_words, [](const auto& word) { return word.size() > 1; });
}

void add_bad_words(const Sequence& sequence, std::vector<int32_t>& banned) {
  const auto answer =
      std::span(sequence.tokens).subspan(static_cast<size_t>(sequence.prompt_tokens));
  for (const std::vector<int32_t>& word : sequence.request.bad_words) {
    const auto before = std::span(word).first(word.size() - 1);
    if (before.size() <= answer.size() && std::ranges::equal(before, answer.last(before.size()))) {
      banned.push_back(word.back());
    }
  }
}

}  // namespace nibble
