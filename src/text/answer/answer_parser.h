#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/answer/answer_form.h"
#include "text/answer/answer_piece.h"

namespace nibble {

class HarmonyStage;
class ThinkStage;

/// Takes one answer apart, as its tokens come: what the model thinks, what it says, which tools it
/// calls. The pieces, joined, do not depend on how the text was cut. Not thread-safe.
class AnswerParser final {
 public:
  struct Options {
    AnswerForm form;
    bool thinks_already = false;                    // ends_in_thought()
    std::vector<std::string> functions;             // that may be called; empty: calls are content
    DecodeSpecials tokens = DecodeSpecials::kSkip;  // that mean nothing to the form
  };

  explicit AnswerParser(const Options& options);
  ~AnswerParser();
  AnswerParser(AnswerParser&&) noexcept;

  void push_text(std::string_view text) { first_->text(text); }
  /// A special token, by its name; hidden where the form has no use for it.
  void push_special(std::string_view token) { first_->special(token); }
  void finish() { first_->finish(); }
  /// What has become certain since the last call.
  [[nodiscard]] std::vector<AnswerPiece> take() { return pieces_->take(); }
  [[nodiscard]] bool thinks() const;

 private:
  std::unique_ptr<AnswerPieces> pieces_;
  std::unique_ptr<AnswerStage> calls_;  // null: the first stage does all
  std::unique_ptr<AnswerStage> first_storage_;
  AnswerStage* first_ = nullptr;
  const ThinkStage* think_ = nullptr;
  const HarmonyStage* harmony_ = nullptr;
};

}  // namespace nibble
