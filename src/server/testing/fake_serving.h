#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/engine.h"
#include "server/text_frontend.h"

namespace nibble {

/// The id that ends an answer of the fake; every byte is the token of its own value.
constexpr int32_t kFakeEnd = 256;

/// Byte tokens, and a chat template that puts the contents one after the other.
inline TextFrontend fake_text(
    std::string_view chat_template =
        "{% if messages[0].content == 'refuse me' %}{{ raise_exception('the template refuses') }}"
        "{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% if tools %}{{ tools | length }}{% endif %}") {
  TokenizerParts parts;
  BpeVocabulary vocabulary;
  for (int byte = 0; byte < kFakeEnd; ++byte) {
    vocabulary.pieces.emplace_back(1, static_cast<char>(byte));
  }
  parts.token_bytes = vocabulary.pieces;
  parts.token_bytes.emplace_back("<end>");
  parts.added_tokens.push_back({.id = kFakeEnd, .content = "<end>", .special = true});
  std::vector<uint32_t> ranks(vocabulary.pieces.size());
  std::iota(ranks.begin(), ranks.end(), 0U);
  parts.model = BpeModel::from_ranks(std::move(vocabulary), std::move(ranks), {});
  auto tokenizer = Tokenizer::create(std::move(parts));
  auto chat = ChatTemplate::parse(chat_template, "fake");
  CHECK(tokenizer.ok() && chat.ok());
  return TextFrontend(std::move(tokenizer).value(), std::move(chat).value(), Status());
}

/// Answers with the prompt's own bytes, over and over, one token per step for each request.
class FakeEngine final : public Engine {
 public:
  FakeEngine() {
    options_.max_model_len = 1000;
    options_.max_queued_requests = 100;
    config_.eos_token_ids = {kFakeEnd};
    config_.vocab_size = kFakeEnd + 1;
    config_.hidden_size = 4;
    thread_ = std::thread([this] { run(); });
  }
  ~FakeEngine() override {
    stop_ = true;
    thread_.join();
  }

  Status submit(Request request) override {
    const std::lock_guard lock(mutex_);
    if (refusal_.code() != StatusCode::kOk) {
      return refusal_;
    }
    last_ = request;
    last_.on_event = nullptr;  // what it holds is to go with the request
    running_.push_back({std::move(request), 0});
    return {};
  }
  void drain(double) override {}
  void forget_prefixes() override { ++forgotten; }
  EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    const auto running = static_cast<int64_t>(running_.size());
    return {.running = running,
            .pools = {{.pages_total = 100, .pages_used = running}},
            .pages_total = 100,
            .pages_used = running};
  }
  const ModelConfig& model_config() const override { return config_; }
  const EngineOptions& options() const override { return options_; }

  /// What was submitted last.
  [[nodiscard]] Request last() const {
    const std::lock_guard lock(mutex_);
    return last_;
  }

  std::atomic<int> forgotten{0};              // calls of forget_prefixes()
  std::atomic<bool> held{false};              // true: no tokens come
  std::atomic<int64_t> most_tokens{1 << 30};  // of an answer; then no more come

  void refuse(Status status) {
    const std::lock_guard lock(mutex_);
    refusal_ = std::move(status);
  }

 private:
  struct Running {
    Request request;
    int64_t produced = 0;
  };

  /// Token i has -i / 4 and rank 2; the alternatives are the token behind it in the vocabulary
  /// (rank 1), itself, the one before it ...
  static std::vector<ScoredToken> scores_of(const Request& request) {
    std::vector<ScoredToken> out;
    for (size_t i = 1; i < request.prompt.size(); ++i) {
      const float logprob = -0.25F * static_cast<float>(i);
      ScoredToken scored{.token = request.prompt[i], .rank = 2, .logprob = logprob};
      for (int top = 0; top < request.prompt_logprobs; ++top) {
        scored.top_logprobs.push_back(
            {scored.token + 1 - top, logprob + 0.125F * static_cast<float>(1 - top)});
      }
      out.push_back(std::move(scored));
    }
    return out;
  }

  /// The hidden state of a token: {itself, 3, 0, 4}.
  static std::vector<float> pooled_of(const Request& request) {
    if (request.pooling == Pooling::kNone) {
      return {};
    }
    const auto sum = std::accumulate(request.prompt.begin(), request.prompt.end(), 0.0F);
    const float mean = sum / static_cast<float>(request.prompt.size());
    const bool last = request.pooling == Pooling::kLast;
    return {last ? static_cast<float>(request.prompt.back()) : mean, 3, 0, 4};
  }

  /// The end where it may come, else the token if it may, else any that may.
  static int32_t allowed_token(TokenConstraint& constraint, int32_t token, int64_t produced) {
    std::vector<uint32_t> mask(static_cast<size_t>(mask_words(kFakeEnd + 1)));
    std::vector<int32_t> allowed;
    if (constraint.fill(mask)) {
      for (int32_t each = 0; each <= kFakeEnd; ++each) {
        if (mask_allows(mask, each)) {
          allowed.push_back(each);
        }
      }
      CHECK(!allowed.empty());
      const bool fits = mask_allows(mask, token);
      if (allowed.back() == kFakeEnd) {
        token = kFakeEnd;
      } else if (!fits) {
        token = allowed[static_cast<size_t>(produced * 7919) % allowed.size()];
      }
    }
    CHECK(constraint.accept(token).ok());
    return token;
  }

  /// As the engine does at a deadline.
  static void end_late(const Running& one) {
    TokenEvent event;
    event.finish = FinishReason::kTimeout;
    if (one.produced == 0) {
      event.failure = Status(StatusCode::kUnavailable, "too late");
    }
    one.request.on_event(event);
  }

  /// One token of one request; true when that was its last.
  static bool advance(Running& one) {
    const Request& request = one.request;
    TokenEvent event{.prompt_tokens = static_cast<int64_t>(request.prompt.size())};
    if (*request.cancelled) {
      event.finish = FinishReason::kCancelled;
      request.on_event(event);
      return true;
    }
    if (std::chrono::steady_clock::now() >= request.deadline) {
      end_late(one);
      return true;
    }
    if (one.produced == 0 && request.prompt_logprobs >= 0) {
      event.prompt_logprobs = scores_of(request);
    }
    if (request.max_tokens == 0) {
      event.pooled = pooled_of(request);
      event.finish = FinishReason::kLength;
    } else {
      const auto at = static_cast<size_t>(one.produced++) % request.prompt.size();
      event.token = request.prompt[at] == '$' ? kFakeEnd : request.prompt[at];
      if (request.constraint != nullptr) {
        event.token = allowed_token(*request.constraint, event.token, one.produced);
      }
      event.logprob = -0.5F;
      for (int i = 0; i < request.top_logprobs; ++i) {
        event.top_logprobs.push_back({event.token + i, -0.5F - static_cast<float>(i)});
      }
      event.finish = event.token == kFakeEnd && !request.ignore_eos ? FinishReason::kStop
                     : one.produced == request.max_tokens           ? FinishReason::kLength
                                                                    : FinishReason::kNone;
    }
    request.on_event(event);
    return event.finish != FinishReason::kNone;
  }

  void run() {
    while (!stop_) {
      {
        const std::lock_guard lock(mutex_);
        std::erase_if(running_, [this](Running& one) {
          const bool waits = held || one.produced >= most_tokens;
          const bool late = std::chrono::steady_clock::now() >= one.request.deadline;
          return (!waits || late) && advance(one);
        });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  EngineOptions options_;
  ModelConfig config_;
  mutable std::mutex mutex_;
  std::vector<Running> running_;
  Request last_;
  Status refusal_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace nibble
