#include "text/answer/llama_calls.h"

#include <utility>

#include "text/answer/call_text.h"
#include "text/answer/damaged_call.h"
#include "text/answer/trimmed_text.h"

namespace nibble {
namespace {

constexpr std::string_view kPythonTag = "<|python_tag|>";

}  // namespace

LlamaCalls::LlamaCalls(std::vector<std::string> functions, AnswerPieces& pieces)
    : functions_(std::move(functions)), pieces_(pieces) {}

void LlamaCalls::text(std::string_view text) {
  if (state_ == State::kContent) {
    pieces_.content(text);
    return;
  }
  held_ += text;
  if (state_ == State::kHeld) {
    return;
  }
  const size_t first = held_.find_first_not_of(kBlanks);
  const std::string_view rest =
      first == std::string::npos ? std::string_view() : std::string_view(held_).substr(first);
  if (rest.starts_with('{') || rest.starts_with(kPythonTag)) {
    state_ = State::kHeld;
  } else if (!kPythonTag.starts_with(rest)) {
    state_ = State::kContent;
    pieces_.content(std::exchange(held_, {}));
  }
}

void LlamaCalls::special(std::string_view token) {
  if (token != kPythonTag) {
    pieces_.token(token);
    return;
  }
  if (state_ == State::kContent) {  // a call after what was said
    state_ = State::kHeld;
  }
  text(token);
}

void LlamaCalls::finish() {
  if (held_.empty()) {
    return;
  }
  const std::string_view body = trim(held_);
  const bool tagged = body.starts_with(kPythonTag);
  const auto calls = parse_llama_calls(tagged ? body.substr(kPythonTag.size()) : body, functions_);
  if (state_ == State::kHeld && calls) {
    for (const ToolCall& call : *calls) {
      pieces_.call(call);
    }
    return;
  }
  if (tagged) {
    report_damaged_call(held_);
  }
  pieces_.content(held_);
}

}  // namespace nibble
