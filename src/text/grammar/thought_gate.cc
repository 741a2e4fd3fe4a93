#include "text/grammar/thought_gate.h"

#include <optional>
#include <string>
#include <utility>

#include "text/answer/trimmed_text.h"

namespace nibble {
namespace {

class ThoughtGate final : public TokenConstraint {
 public:
  ThoughtGate(const Tokenizer& tokenizer,
              ThoughtMarks marks,
              ThoughtStart start,
              std::unique_ptr<TokenConstraint> inner)
      : tokenizer_(tokenizer),
        opening_(tokenizer.token_to_id(marks.opening)),
        closing_(marks.closing),
        state_(start == ThoughtStart::kThinking ? State::kThought : State::kBegin),
        inner_(std::move(inner)) {}

  bool fill(std::span<uint32_t> mask) override {
    if (state_ == State::kThought) {
      return false;
    }
    const bool some = inner_->fill(mask);
    if (some && state_ == State::kBegin && opening_) {
      mask[static_cast<size_t>(*opening_ / 32)] |= uint32_t{1} << (*opening_ % 32);
    }
    return some;
  }

  Status accept(int32_t token) override {
    if (state_ == State::kBegin) {
      state_ = token == opening_ ? State::kThought : State::kAnswer;
      if (state_ == State::kThought) {
        return {};
      }
    }
    if (state_ == State::kAnswer) {
      return inner_->accept(token);
    }
    tail_ += tokenizer_.token_bytes(token);
    const size_t at = tail_.find(closing_);
    if (at == std::string::npos) {
      tail_.erase(0, tail_.size() - std::min(tail_.size(), closing_.size()));
      return {};
    }
    state_ = State::kAnswer;
    if (!trim(std::string_view(tail_).substr(at + closing_.size())).empty()) {
      return make_error(StatusCode::kInvalidArgument,
                        "the model ended its thought within a token, where no grammar can begin");
    }
    return {};
  }

 private:
  enum class State : uint8_t { kBegin, kThought, kAnswer };

  const Tokenizer& tokenizer_;
  const std::optional<int32_t> opening_;
  const std::string_view closing_;
  State state_;
  std::string tail_;  // of the thought
  std::unique_ptr<TokenConstraint> inner_;
};

}  // namespace

std::optional<ThoughtMarks> thought_marks(ReasoningForm form) {
  switch (form) {
    case ReasoningForm::kThink:
      return ThoughtMarks{"<think>", "</think>"};
    case ReasoningForm::kMistral:
      return ThoughtMarks{"[THINK]", "[/THINK]"};
    default:
      return std::nullopt;
  }
}

std::unique_ptr<TokenConstraint> after_thought(const Tokenizer& tokenizer,
                                               ReasoningForm form,
                                               ThoughtStart start,
                                               std::unique_ptr<TokenConstraint> inner) {
  const std::optional<ThoughtMarks> marks = thought_marks(form);
  return marks ? std::make_unique<ThoughtGate>(tokenizer, *marks, start, std::move(inner))
               : std::move(inner);
}

}  // namespace nibble
