#include "text/answer/harmony_stage.h"

#include <algorithm>
#include <array>
#include <utility>

#include "text/answer/call_text.h"
#include "text/answer/damaged_call.h"
#include "text/answer/trimmed_text.h"

namespace nibble {
namespace {

constexpr std::string_view kChannel = "<|channel|>";
constexpr std::string_view kRecipient = " to=";
constexpr std::string_view kFunctions = "functions.";

/// The word behind a mark in a header; empty without it.
std::string_view word_after(std::string_view header, std::string_view mark) {
  const size_t at = header.find(mark);
  if (at == std::string_view::npos) {
    return {};
  }
  header = trim(header.substr(at + mark.size()));
  return header.substr(0, header.find_first_of(" \t\r\n<"));
}

}  // namespace

std::string_view harmony_function(std::string_view header) {
  const std::string_view recipient = word_after(header, kRecipient);
  return recipient.starts_with(kFunctions) ? recipient.substr(kFunctions.size()) : "";
}

void HarmonyStage::text(std::string_view text) {
  switch (kind_) {
    case Kind::kThought:
      pieces_.reasoning(text);
      return;
    case Kind::kContent:
      pieces_.content(text);
      return;
    case Kind::kCall:
      body_ += text;
      return;
    case Kind::kHeader:
      break;
  }
  header_ += text;
  const std::string_view begin = std::string_view(header_).substr(0, kRecipient.size());
  if (!marked_ && !kRecipient.starts_with(begin)) {  // no header: an answer without a form
    kind_ = Kind::kContent;
    pieces_.content(std::exchange(header_, {}));
  }
}

void HarmonyStage::special(std::string_view token) {
  constexpr std::array<std::string_view, 3> kEnds = {"<|end|>", "<|call|>", "<|return|>"};
  if (token == "<|message|>") {
    if (kind_ == Kind::kHeader) {
      begin_message();
    }
  } else if (token == "<|start|>" || std::ranges::find(kEnds, token) != kEnds.end()) {
    end_message();
    marked_ = true;
  } else if (token == kChannel && kind_ != Kind::kHeader) {  // a message without its end
    end_message();
    marked_ = true;
    header_ = token;
  } else if (kind_ == Kind::kHeader) {
    marked_ = true;
    header_ += token;
  }
}

void HarmonyStage::begin_message() {
  const std::string_view channel = word_after(header_, kChannel);
  const std::string_view recipient = word_after(header_, kRecipient);
  if (recipient.starts_with(kFunctions)) {
    kind_ = Kind::kCall;
    function_ = harmony_function(header_);
  } else if (channel == "analysis" || !recipient.empty()) {
    kind_ = Kind::kThought;
  } else {
    kind_ = Kind::kContent;
  }
  header_.clear();
  marked_ = false;
}

void HarmonyStage::end_message() {
  if (kind_ == Kind::kCall) {
    const auto arguments = arguments_text(body_);
    if (arguments && !function_.empty()) {
      pieces_.call({function_, *arguments});
    } else {
      report_damaged_call(body_);
      pieces_.content(body_);
    }
    body_.clear();
  }
  kind_ = Kind::kHeader;
  header_.clear();
}

void HarmonyStage::finish() {
  if (kind_ == Kind::kHeader && !marked_) {
    pieces_.content(header_);
  }
  end_message();
}

}  // namespace nibble
