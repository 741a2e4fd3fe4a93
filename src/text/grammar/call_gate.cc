#include "text/grammar/call_gate.h"

#include <algorithm>

#include "text/answer/harmony_stage.h"

namespace nibble {
namespace {

/// Free until a call begins; held to a grammar until that is over.
class Gate : public GrammarState {
 public:
  explicit Gate(CallTail::Next next) : next_(next) {}

  bool fill(std::span<uint32_t> mask) final {
    return call_ != nullptr ? call_->fill(mask) : fill_free(mask);
  }

  Status accept(int32_t token) final {
    if (call_ == nullptr) {
      call_ = begun_by(token);
      return {};
    }
    NIBBLE_RETURN_IF_ERROR(call_->accept(token));
    if (next_ == CallTail::Next::kText && call_->complete()) {
      call_ = nullptr;
    }
    return {};
  }

  [[nodiscard]] bool complete() const final { return call_ == nullptr || call_->complete(); }

 private:
  /// Outside of calls.
  virtual bool fill_free(std::span<uint32_t> mask) = 0;
  /// What a call has to obey that this token begins; null: it begins none.
  virtual std::unique_ptr<GrammarState> begun_by(int32_t token) = 0;

  const CallTail::Next next_;
  std::unique_ptr<GrammarState> call_;  // null: there is none
};

class MarkGate final : public Gate {
 public:
  MarkGate(const Tokenizer& tokenizer,
           std::shared_ptr<const CallMark> mark,
           std::shared_ptr<const Grammar> calls,
           CallTail::Next next)
      : Gate(next), tokenizer_(tokenizer), mark_(std::move(mark)), calls_(std::move(calls)) {}

 private:
  bool fill_free(std::span<uint32_t> mask) override { return mark_->clear_crossing(tail_, mask); }

  std::unique_ptr<GrammarState> begun_by(int32_t token) override {
    const std::string& mark = mark_->text();
    if (tokenizer_.is_special(token)) {
      tail_.clear();  // a mark is one token, or text alone
    }
    tail_ += tokenizer_.token_bytes(token);
    if (tail_.ends_with(mark)) {
      tail_.clear();
      return calls_->start();
    }
    tail_.erase(0, tail_.size() - std::min(tail_.size(), mark.size() - 1));
    return nullptr;
  }

  const Tokenizer& tokenizer_;
  const std::shared_ptr<const CallMark> mark_;
  const std::shared_ptr<const Grammar> calls_;
  std::string tail_;  // of the text, shorter than the mark
};

class HarmonyGate final : public Gate {
 public:
  HarmonyGate(const Tokenizer& tokenizer, std::shared_ptr<const ArgumentGrammars> arguments)
      : Gate(CallTail::Next::kEnd), tokenizer_(tokenizer), arguments_(std::move(arguments)) {}

 private:
  static constexpr size_t kLongestHeader = 4096;

  bool fill_free(std::span<uint32_t> /*mask*/) override { return false; }

  // As HarmonyStage reads it.
  std::unique_ptr<GrammarState> begun_by(int32_t token) override {
    const std::string& bytes = tokenizer_.token_bytes(token);
    const bool special = tokenizer_.is_special(token);
    if (special && bytes == "<|message|>") {
      const bool header = std::exchange(in_header_, false);
      const auto found = arguments_->find(harmony_function(std::exchange(header_, {})));
      return header && found != arguments_->end() ? found->second->start() : nullptr;
    }
    if (special && (bytes == "<|start|>" || bytes == "<|end|>")) {
      in_header_ = true;
      header_.clear();
      return nullptr;
    }
    in_header_ = in_header_ || (special && bytes == "<|channel|>");  // a message without its end
    if (in_header_ && header_.size() < kLongestHeader) {
      header_ += bytes;
    }
    return nullptr;
  }

  const Tokenizer& tokenizer_;
  const std::shared_ptr<const ArgumentGrammars> arguments_;
  bool in_header_ = true;  // an answer begins in one
  std::string header_;
};

class MarkedCalls final : public Grammar {
 public:
  MarkedCalls(const Tokenizer& tokenizer,
              std::shared_ptr<const CallMark> mark,
              std::shared_ptr<const Grammar> calls,
              CallTail::Next next)
      : tokenizer_(tokenizer), mark_(std::move(mark)), calls_(std::move(calls)), next_(next) {}

  [[nodiscard]] std::unique_ptr<GrammarState> start() const override {
    return std::make_unique<MarkGate>(tokenizer_, mark_, calls_, next_);
  }
  [[nodiscard]] size_t bytes() const override { return calls_->bytes(); }

 private:
  const Tokenizer& tokenizer_;
  const std::shared_ptr<const CallMark> mark_;
  const std::shared_ptr<const Grammar> calls_;
  const CallTail::Next next_;
};

class HarmonyCalls final : public Grammar {
 public:
  HarmonyCalls(const Tokenizer& tokenizer, ArgumentGrammars arguments)
      : tokenizer_(tokenizer),
        arguments_(std::make_shared<const ArgumentGrammars>(std::move(arguments))) {}

  [[nodiscard]] std::unique_ptr<GrammarState> start() const override {
    return std::make_unique<HarmonyGate>(tokenizer_, arguments_);
  }
  [[nodiscard]] size_t bytes() const override {
    size_t all = 0;
    for (const auto& [name, grammar] : *arguments_) {
      all += grammar->bytes();
    }
    return all;
  }

 private:
  const Tokenizer& tokenizer_;
  const std::shared_ptr<const ArgumentGrammars> arguments_;
};

}  // namespace

CallMark::CallMark(const Tokenizer& tokenizer, std::string mark)
    : mark_(std::move(mark)), crossing_(mark_.size()) {
  for (int32_t token = 0; token < tokenizer.vocab_size(); ++token) {
    const std::string_view bytes = tokenizer.token_bytes(token);
    if (tokenizer.is_special(token)) {
      continue;
    }
    for (size_t there = 0; there < mark_.size(); ++there) {
      const std::string_view rest = std::string_view(mark_).substr(there);
      // Behind no part of it the mark may also begin within the token.
      const size_t at = there == 0 ? bytes.find(rest) : bytes.starts_with(rest) ? 0 : bytes.npos;
      if (at != std::string_view::npos && at + rest.size() < bytes.size()) {
        crossing_[there].push_back(token);
      }
    }
  }
}

bool CallMark::clear_crossing(std::string_view tail, std::span<uint32_t> mask) const {
  bool some = false;
  for (size_t there = 0; there < mark_.size(); ++there) {
    if (crossing_[there].empty() || !tail.ends_with(std::string_view(mark_).substr(0, there))) {
      continue;
    }
    if (!some) {
      std::ranges::fill(mask, ~0U);
      some = true;
    }
    for (const int32_t token : crossing_[there]) {
      if (const auto word = static_cast<size_t>(token / 32); word < mask.size()) {
        mask[word] &= ~(1U << (token % 32));
      }
    }
  }
  return some;
}

std::shared_ptr<const Grammar> gated_calls(const Tokenizer& tokenizer,
                                           std::shared_ptr<const CallMark> mark,
                                           std::shared_ptr<const Grammar> calls,
                                           CallTail::Next next) {
  return std::make_shared<const MarkedCalls>(tokenizer, std::move(mark), std::move(calls), next);
}

std::shared_ptr<const Grammar> gated_harmony_calls(const Tokenizer& tokenizer,
                                                   ArgumentGrammars arguments) {
  return std::make_shared<const HarmonyCalls>(tokenizer, std::move(arguments));
}

}  // namespace nibble
