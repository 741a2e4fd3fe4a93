#include "text/answer/bracketed_calls.h"

#include <algorithm>
#include <utility>

#include "text/answer/damaged_call.h"

namespace nibble {
namespace {

std::vector<std::string> markers_of(const CallSyntax& syntax) {
  std::vector<std::string> markers{syntax.begin};
  if (!syntax.end.empty()) {
    markers.push_back(syntax.end);
  }
  markers.insert(markers.end(), syntax.ignored.begin(), syntax.ignored.end());
  return markers;
}

}  // namespace

BracketedCalls::BracketedCalls(CallSyntax syntax, AnswerPieces& pieces)
    : syntax_(std::move(syntax)), pieces_(pieces), scanner_(markers_of(syntax_), *this) {}

void BracketedCalls::add_to_call(std::string_view text) {
  body_ += text;
  extent_.push(text);
}

void BracketedCalls::on_text(std::string_view text) {
  if (in_call_) {
    add_to_call(text);
  } else {
    pieces_.content(content_.push(text));
  }
}

void BracketedCalls::on_token(std::string_view token) {
  if (!in_call_) {
    pieces_.token(token);
  } else if (std::ranges::find(syntax_.inner, token) != syntax_.inner.end()) {
    add_to_call(token);
  }
}

void BracketedCalls::on_marker(std::string_view marker, MarkerScanner::Written written) {
  const bool token = written == MarkerScanner::Written::kAsToken;
  if (in_call_ && !token && extent_.in_string()) {
    add_to_call(marker);
  } else if (marker == syntax_.begin) {
    if (in_call_) {
      end_call("");
    }
    begin_call();
  } else if (marker == syntax_.end) {
    if (in_call_) {
      end_call(syntax_.end);
    } else if (!token) {
      on_text(marker);
    }
  } else if (in_call_) {  // the calls are over, and the last one lacks its end
    end_call("");
  } else {
    content_.skip_blanks();
  }
}

void BracketedCalls::begin_call() {
  content_.skip_blanks();
  in_call_ = true;
  body_.clear();
  extent_ = {};
}

void BracketedCalls::end_call(std::string_view end) {
  in_call_ = false;
  if (const ParsedCalls calls = syntax_.parse(body_)) {
    for (const ToolCall& call : *calls) {
      pieces_.call(call);
    }
    return;
  }
  report_damaged_call(body_);
  pieces_.content(syntax_.begin);
  pieces_.content(body_);
  pieces_.content(end);
  content_ = {};
}

void BracketedCalls::finish() {
  scanner_.finish();
  if (in_call_) {
    end_call("");
  } else if (pieces_.calls() == 0) {
    pieces_.content(content_.take_blanks());
  }
}

}  // namespace nibble
