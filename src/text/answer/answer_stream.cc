#include "text/answer/answer_stream.h"

#include <utility>

namespace nibble {

AnswerStream::AnswerStream(const Tokenizer& tokenizer, Options options)
    : tokenizer_(tokenizer),
      has_parts_(options.parser.form != AnswerForm{}),
      text_(tokenizer, std::move(options.stops), options.stop_text, options.specials),
      parser_((options.parser.tokens = options.specials, std::move(options.parser))) {}

std::vector<AnswerPiece> AnswerStream::push(int32_t token) {
  if (!has_parts_ || !tokenizer_.is_special(token)) {
    parser_.push_text(text_.push(token));
    return parser_.take();
  }
  parser_.push_text(text_.finish());  // a stop string does not reach over a special token
  if (!stopped()) {
    parser_.push_special(tokenizer_.token_bytes(token));
  }
  return parser_.take();
}

std::vector<AnswerPiece> AnswerStream::finish() {
  parser_.push_text(text_.finish());
  parser_.finish();
  return parser_.take();
}

}  // namespace nibble
