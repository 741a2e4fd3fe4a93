#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/thread_name.h"
#include "engine/engine_core.h"

namespace nibble {
namespace {

constexpr const char* kFailed = "the engine failed on another request";
constexpr std::chrono::seconds kCountInterval{1};  // of experts

class ThreadedEngine final : public Engine {
 public:
  explicit ThreadedEngine(std::unique_ptr<EngineCore> core)
      : core_(std::move(core)), config_(core_->model_config()), options_(core_->options()) {
    stats_ = core_->stats();
    thread_ = std::thread([this] {
      name_thread("engine");
      loop();
    });
  }

  ~ThreadedEngine() override {
    {
      const std::lock_guard lock(mutex_);
      refusing_ = stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  Status submit(Request request) override {
    NIBBLE_RETURN_IF_ERROR(EngineCore::check(request, options_, config_));
    {
      const std::lock_guard lock(mutex_);
      if (!stats_.healthy) {
        return make_error(StatusCode::kUnavailable,
                          "the engine failed and serves no more ({}); restart it", stats_.failure);
      }
      if (refusing_) {
        return make_error(StatusCode::kUnavailable, "the engine is shutting down");
      }
      if (queued(request.client) >= options_.max_queued_requests) {
        return make_error(StatusCode::kResourceExhausted,
                          "{} requests are waiting already (max_queued_requests)",
                          options_.max_queued_requests);
      }
      inbox_.push_back(std::move(request));
    }
    wake_.notify_one();
    return {};
  }

  void drain(double timeout_s) override {
    std::unique_lock lock(mutex_);
    refusing_ = true;
    const auto finished = [&] { return inbox_.empty() && unfinished_ == 0; };
    if (idle_.wait_for(lock, std::chrono::duration<double>(timeout_s), finished)) {
      return;
    }
    cancelling_ = true;
    wake_.notify_all();
    idle_.wait(lock, finished);
  }

  void forget_prefixes() override {
    const std::lock_guard lock(mutex_);
    forgetting_ = true;  // in front of the next requests, which alone could tell
  }

  [[nodiscard]] EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    EngineStats out = stats_;
    out.waiting += static_cast<int64_t>(inbox_.size());
    return out;
  }

  [[nodiscard]] const ModelConfig& model_config() const override { return config_; }
  [[nodiscard]] const EngineOptions& options() const override { return options_; }

 private:
  // Requests of a client that wait and were never admitted.
  [[nodiscard]] int64_t queued(int64_t client) const {
    const auto found = never_admitted_.find(client);
    return (found == never_admitted_.end() ? 0 : found->second) +
           std::ranges::count(inbox_, client, &Request::client);
  }

  void loop() {
    bool busy = false;
    while (take_requests(busy)) {
      busy = run_step();
      publish();
    }
    core_->cancel_all();
    publish();
  }

  // Moves new requests into the core, waiting for some if it is idle. False when told to stop.
  bool take_requests(bool busy) {
    std::deque<Request> arrived;
    bool cancelling = false;
    bool forgetting = false;
    {
      std::unique_lock lock(mutex_);
      if (!busy) {
        wake_.wait(lock, [&] { return stopping_ || cancelling_ || !inbox_.empty(); });
      }
      arrived.swap(inbox_);
      cancelling = std::exchange(cancelling_, false);
      forgetting = std::exchange(forgetting_, false);
      unfinished_ += static_cast<int64_t>(arrived.size());
      for (const Request& request : arrived) {
        ++never_admitted_[request.client];
      }
      stats_.waiting += static_cast<int64_t>(arrived.size());
      if (stopping_) {
        cancelling = true;
      }
    }
    if (forgetting) {
      core_->forget_prefixes();
    }
    for (Request& request : arrived) {
      core_->add(std::move(request));
    }
    if (!cancelling) {
      return true;
    }
    core_->cancel_all();
    const std::lock_guard lock(mutex_);
    return !stopping_;
  }

  // The one place of the engine where a broken invariant ends: it fails the batch, not the process.
  bool run_step() {
    if (!healthy_) {  // these were taken before submit() knew
      core_->abandon(kFailed, kFailed);
      return false;
    }
    try {
      const bool busy = core_->step();
      count_experts();
      return busy;
    } catch (const std::exception& error) {
      NIBBLE_LOG(kError, "engine step failed: {}", error.what());
      healthy_ = false;
      failure_ = error.what();
      core_->abandon("internal error: " + failure_, kFailed);
      return false;
    }
  }

  // Now and then, as a device may have to be waited for; and when there is nothing else to do.
  void count_experts() {
    const auto now = std::chrono::steady_clock::now();
    if (core_->idle() || now >= next_count_) {
      experts_ = core_->expert_counts();
      next_count_ = now + kCountInterval;
    }
  }

  void publish() {
    const EngineStats now = core_->stats();
    const std::lock_guard lock(mutex_);
    stats_ = now;
    stats_.experts = experts_;
    stats_.healthy = healthy_;
    stats_.failure = failure_;
    unfinished_ = core_->unfinished();
    never_admitted_ = core_->never_admitted();
    if (unfinished_ == 0) {
      idle_.notify_all();
    }
  }

  std::unique_ptr<EngineCore> core_;  // the engine thread's alone once that runs
  const ModelConfig config_;
  const EngineOptions options_;
  bool healthy_ = true;  // this and the next ones are the engine thread's
  std::string failure_;
  ExpertCounts experts_;
  std::chrono::steady_clock::time_point next_count_;

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Request> inbox_;
  int64_t unfinished_ = 0;             // taken from the inbox, without final event
  EngineCore::Counts never_admitted_;  // of these, still in the first queue
  bool refusing_ = false;
  bool cancelling_ = false;
  bool forgetting_ = false;
  bool stopping_ = false;
  EngineStats stats_;

  std::thread thread_;
};

}  // namespace

Result<EngineOptions> Engine::resolve_options(const EngineOptions& options,
                                              const ModelConfig& config,
                                              const Backend* backend) {
  return EngineCore::resolve(options, config, backend);
}

Result<std::unique_ptr<Engine>> Engine::start(std::unique_ptr<Model> model,
                                              const EngineOptions& options,
                                              std::unique_ptr<Model> draft) {
  NIBBLE_ASSIGN_OR_RETURN(const EngineOptions resolved,
                          EngineCore::resolve(options, model->config()));
  NIBBLE_ASSIGN_OR_RETURN(auto core,
                          EngineCore::create(std::move(model), resolved, std::move(draft)));
  return std::unique_ptr<Engine>(std::make_unique<ThreadedEngine>(std::move(core)));
}

}  // namespace nibble
