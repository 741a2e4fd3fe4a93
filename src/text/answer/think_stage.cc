#include "text/answer/think_stage.h"

#include <utility>

namespace nibble {

ThinkStage::ThinkStage(Markers markers, Begin begin, AnswerPieces& pieces, AnswerStage& next)
    : markers_(std::move(markers)),
      pieces_(pieces),
      next_(next),
      scanner_({markers_.open, markers_.close}, *this),
      inside_(begin == Begin::kInside) {
  thought_.skip_blanks();
}

void ThinkStage::say(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlanks);
  if (after_thought_) {
    if (first == std::string_view::npos) {
      return;
    }
    text.remove_prefix(first);
    after_thought_ = false;
  }
  said_ = said_ || first != std::string_view::npos;
  next_.text(text);
}

void ThinkStage::on_text(std::string_view text) {
  if (inside_) {
    pieces_.reasoning(thought_.push(text));
  } else {
    say(text);
  }
}

void ThinkStage::on_marker(std::string_view marker, MarkerScanner::Written written) {
  const bool token = written == MarkerScanner::Written::kAsToken;
  if (marker == markers_.open && !inside_ && (token || !said_)) {
    inside_ = true;
    thought_.skip_blanks();
  } else if (marker == markers_.close && inside_) {
    inside_ = false;
    after_thought_ = true;
    thought_.skip_blanks();
  } else if (!token) {
    on_text(marker);
  }
}

void ThinkStage::on_token(std::string_view token) {
  if (!inside_) {
    next_.special(token);
  }
}

void ThinkStage::finish() {
  scanner_.finish();
  next_.finish();
}

}  // namespace nibble
