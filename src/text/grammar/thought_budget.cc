#include "text/grammar/thought_budget.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "text/answer/trimmed_text.h"

namespace nibble {
namespace {

class ThoughtBudget final : public TokenConstraint {
 public:
  ThoughtBudget(const Tokenizer& tokenizer,
                ThoughtMarks marks,
                std::vector<int32_t> closing,
                int64_t budget)
      : tokenizer_(tokenizer), marks_(marks), closing_(std::move(closing)), left_(budget) {}

  void begin(ThoughtStart start, std::unique_ptr<TokenConstraint> inner) {
    state_ = start == ThoughtStart::kThinking ? State::kThought : State::kBegin;
    inner_ = std::move(inner);
  }

  bool fill(std::span<uint32_t> mask) override {
    if (state_ != State::kThought || left_ > 0) {
      return inner_ != nullptr && inner_->fill(mask);
    }
    std::ranges::fill(mask, 0U);
    const int32_t next = closing_[closed_];
    mask[static_cast<size_t>(next / 32)] |= uint32_t{1} << (next % 32);
    return true;
  }

  Status accept(int32_t token) override {
    if (state_ == State::kThought && left_ > 0) {
      --left_;
    } else if (state_ == State::kThought && token != closing_[closed_++]) {
      return {StatusCode::kInvalidArgument, "the thought was to end here"};
    }
    follow(tokenizer_.token_bytes(token));
    return inner_ == nullptr ? Status() : inner_->accept(token);
  }

 private:
  enum class State : uint8_t { kBegin, kThought, kAnswer };

  void follow(const std::string& bytes) {
    text_ += bytes;
    if (state_ == State::kBegin) {
      const std::string_view begun = trim(text_);
      if (begun.starts_with(marks_.opening)) {
        state_ = State::kThought;
        text_.clear();
      } else if (!marks_.opening.starts_with(begun)) {
        state_ = State::kAnswer;
      }
    } else if (state_ == State::kThought) {
      if (text_.find(marks_.closing) != std::string::npos || closed_ == closing_.size()) {
        state_ = State::kAnswer;
      }
      text_.erase(0, text_.size() - std::min(text_.size(), marks_.closing.size()));
    }
    if (state_ == State::kAnswer) {
      text_.clear();
    }
  }

  const Tokenizer& tokenizer_;
  const ThoughtMarks marks_;
  const std::vector<int32_t> closing_;
  int64_t left_;       // tokens that the thought may still have
  size_t closed_ = 0;  // of closing_, behind those
  State state_ = State::kBegin;
  std::string text_;  // of the answer's beginning, the end of the thought
  std::unique_ptr<TokenConstraint> inner_;
};

}  // namespace

Result<std::unique_ptr<TokenConstraint>> limited_thought(const ThoughtLimit& limit,
                                                         ThoughtStart start,
                                                         std::unique_ptr<TokenConstraint> inner) {
  NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> closing,
                          limit.tokenizer.encode(limit.marks.closing, SpecialTokens::kParse));
  auto out = std::make_unique<ThoughtBudget>(limit.tokenizer, limit.marks, std::move(closing),
                                             limit.tokens);
  out->begin(start, std::move(inner));
  return std::unique_ptr<TokenConstraint>(std::move(out));
}

}  // namespace nibble
