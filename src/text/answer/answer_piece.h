#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer.h"

namespace nibble {

/// A piece of an answer, as clients see it. A call is kCallBegin, kArguments and kCallEnd, one
/// after the other: nothing of it is shown before all of it is known to be valid.
struct AnswerPiece {
  enum class Kind : uint8_t { kReasoning, kContent, kCallBegin, kArguments, kCallEnd };

  Kind kind = Kind::kContent;
  std::string text;     // of kCallBegin: the name of the function; kArguments: a JSON object
  std::string id = {};  // of kCallBegin: what the model calls the call; empty: nothing

  bool operator==(const AnswerPiece&) const = default;
};

/// Adds a piece behind others; reasoning behind reasoning, and content behind content, joins it.
void append_piece(std::vector<AnswerPiece>& pieces, AnswerPiece piece);
/// All of them one after the other.
[[nodiscard]] std::vector<AnswerPiece> joined_pieces(std::vector<AnswerPiece> pieces);

/// A call of a function.
struct ToolCall {
  std::string name;
  std::string arguments;  // text of a JSON object
  std::string id = {};

  bool operator==(const ToolCall&) const = default;
};

/// A part of a parser: takes text and special tokens in their order.
class AnswerStage {
 public:
  virtual ~AnswerStage() = default;
  virtual void text(std::string_view text) = 0;
  /// A token that is no part of the text, by its name ("<|python_tag|>").
  virtual void special(std::string_view token) = 0;
  /// The answer is over.
  virtual void finish() = 0;
};

/// Collects pieces, and gives them joined.
class AnswerPieces final {
 public:
  /// tokens: whether special tokens that mean nothing to the form are content.
  explicit AnswerPieces(DecodeSpecials tokens) : tokens_(tokens) {}

  /// A special token that means nothing.
  void token(std::string_view token) {
    if (tokens_ == DecodeSpecials::kKeep) {
      content(token);
    }
  }
  void reasoning(std::string_view text) { add(AnswerPiece::Kind::kReasoning, text); }
  void content(std::string_view text) { add(AnswerPiece::Kind::kContent, text); }
  void call(const ToolCall& call) {
    pieces_.push_back({AnswerPiece::Kind::kCallBegin, call.name, call.id});
    pieces_.push_back({AnswerPiece::Kind::kArguments, call.arguments});
    pieces_.push_back({AnswerPiece::Kind::kCallEnd, ""});
    ++calls_;
  }
  [[nodiscard]] std::vector<AnswerPiece> take() {
    return joined_pieces(std::exchange(pieces_, {}));
  }
  /// Of the whole answer.
  [[nodiscard]] int64_t calls() const { return calls_; }

 private:
  void add(AnswerPiece::Kind kind, std::string_view text) {
    if (!text.empty()) {
      pieces_.push_back({kind, std::string(text)});
    }
  }

  DecodeSpecials tokens_;
  std::vector<AnswerPiece> pieces_;
  int64_t calls_ = 0;
};

}  // namespace nibble
