#include "text/detokenizer.h"

#include "text/tokenizer_utf8.h"

namespace nibble {

std::string Detokenizer::push(int32_t id) {
  const std::string& bytes = tokenizer_.token_bytes(id);
  if (bytes.empty() || (specials_ == DecodeSpecials::kSkip && tokenizer_.is_special(id))) {
    return {};
  }
  pending_.append(bytes, strip_space_ && bytes[0] == ' ' ? 1 : 0);
  strip_space_ = false;
  std::string text;
  size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Step step = utf8_step(pending_, at);
    if (step.unit == Utf8Unit::kIncomplete) {
      break;
    }
    if (step.unit == Utf8Unit::kCharacter) {
      text.append(pending_, at, step.length);
    } else {
      text += kReplacementCharacter;
    }
    at += step.length;
  }
  pending_.erase(0, at);
  return text;
}

std::string Detokenizer::flush() {
  const bool held_back = !pending_.empty();
  pending_.clear();
  strip_space_ = strips_space_;
  return held_back ? std::string(kReplacementCharacter) : std::string();
}

}  // namespace nibble
