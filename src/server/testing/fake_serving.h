#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "server/text_frontend.h"

namespace nibble {

/// Byte tokens: id = byte; 256 ends an answer.
class FakeText final : public TextFrontend {
 public:
  static constexpr int32_t kEnd = 256;

  Result<std::vector<int32_t>> encode_chat(const ChatInput& input) const override {
    std::string text;
    for (const Json& message : input.messages->as_array()) {
      text += message.find("content")->as_string();
    }
    if (text == "refuse me") {
      return make_error(StatusCode::kInvalidArgument, "the template refuses");
    }
    return encode(text, false);
  }
  std::vector<int32_t> encode(std::string_view text, bool) const override {
    std::vector<int32_t> ids;
    for (const char c : text) {
      ids.push_back(static_cast<unsigned char>(c));
    }
    return ids;
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      text += token_bytes(id);
    }
    return text;
  }
  std::string token_bytes(int32_t id) const override {
    return id < 256 ? std::string(1, static_cast<char>(id)) : "";
  }
  bool is_special(int32_t id) const override { return id == kEnd; }
};

/// Answers with the prompt's own bytes, over and over, one token per step for each request.
class FakeEngine final : public Engine {
 public:
  FakeEngine() {
    options_.max_model_len = 1000;
    options_.max_queued_requests = 100;
    config_.eos_token_ids = {FakeText::kEnd};
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
    running_.push_back({std::move(request), 0});
    return {};
  }
  void drain(double) override {}
  EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    return {.running = static_cast<int64_t>(running_.size()),
            .pages_total = 100,
            .pages_used = static_cast<int64_t>(running_.size())};
  }
  const ModelConfig& model_config() const override { return config_; }
  const EngineOptions& options() const override { return options_; }

  void refuse(Status status) {
    const std::lock_guard lock(mutex_);
    refusal_ = std::move(status);
  }

 private:
  struct Running {
    Request request;
    int64_t produced = 0;
  };

  /// One token of one request; true when that was its last.
  static bool advance(Running& one) {
    const Request& request = one.request;
    TokenEvent event{.prompt_tokens = static_cast<int64_t>(request.prompt.size())};
    if (*request.cancelled) {
      event.finish = FinishReason::kCancelled;
    } else {
      const auto at = static_cast<size_t>(one.produced++) % request.prompt.size();
      event.token = request.prompt[at] == '$' ? FakeText::kEnd : request.prompt[at];
      event.logprob = -0.5F;
      for (int i = 0; i < request.top_logprobs; ++i) {
        event.top_logprobs.push_back({event.token + i, -0.5F - static_cast<float>(i)});
      }
      event.finish = event.token == FakeText::kEnd && !request.ignore_eos ? FinishReason::kStop
                     : one.produced == request.max_tokens                 ? FinishReason::kLength
                                                                          : FinishReason::kNone;
    }
    request.on_event(event);
    return event.finish != FinishReason::kNone;
  }

  void run() {
    while (!stop_) {
      {
        const std::lock_guard lock(mutex_);
        std::erase_if(running_, [](Running& one) { return advance(one); });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  EngineOptions options_;
  ModelConfig config_;
  mutable std::mutex mutex_;
  std::vector<Running> running_;
  Status refusal_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace nibble
