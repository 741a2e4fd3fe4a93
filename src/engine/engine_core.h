#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "engine/event_outbox.h"
#include "engine/mask_filler.h"
#include "engine/model_runner.h"
#include "engine/sampling_builder.h"
#include "engine/scheduler.h"
#include "engine/speculator.h"
#include "ops/sampler.h"

namespace nibble {

/// The engine without its thread: requests go in, each step() computes once and reports tokens.
/// Used by one thread at a time. Engine wraps it; tests drive it step by step.
class EngineCore final {
 public:
  /// `options` must be resolved. kResourceExhausted when the pages' memory is not to be had.
  ///   draft: proposes tokens, and was loaded as DraftModel::model_options() says; may be null
  static Result<std::unique_ptr<EngineCore>> create(std::unique_ptr<Model> model,
                                                    const EngineOptions& options,
                                                    std::unique_ptr<Model> draft = nullptr);

  /// Fills in defaults and keeps limits consistent: max_model_len is at most what all pages hold,
  /// max_num_batched_tokens at least max_num_seqs. kInvalidArgument names a bad field.
  static Result<EngineOptions> resolve(const EngineOptions& options,
                                       const ModelConfig& config,
                                       const Backend* backend = nullptr);
  /// Whether a request can be served at all; see Engine::submit.
  static Status check(const Request& request,
                      const EngineOptions& options,
                      const ModelConfig& config);

  /// Takes a checked request.
  void add(Request request);
  /// Ends requests that are cancelled or past their deadline, computes one step and reports its
  /// events. False when idle. Where the model samples tokens, the next step may already be under
  /// way when the call returns: what changes its sequences then takes effect a step later. An
  /// InternalError leaves the core in need of abandon().
  bool step();
  /// Ends all requests. Those of the last planned step get `batch_reason`, the others
  /// `other_reason`; both as errors. Pages and prefix cache start afresh.
  void abandon(const std::string& batch_reason, const std::string& other_reason);
  /// Empties the prefix cache; sequences keep their pages.
  void forget_prefixes() { pages_->clear(); }
  /// Ends all requests as cancelled.
  void cancel_all();

  [[nodiscard]] bool idle() const { return scheduler_->idle(); }
  [[nodiscard]] int64_t unfinished() const { return scheduler_->running() + scheduler_->waiting(); }
  /// Requests never admitted so far, by client.
  using Counts = std::unordered_map<int64_t, int64_t>;
  [[nodiscard]] const Counts& never_admitted() const { return never_admitted_; }
  [[nodiscard]] EngineStats stats() const;
  /// Of its model, which this may wait for: stats() lacks them.
  [[nodiscard]] ExpertCounts expert_counts() const {
    return model_->expert_counts() - experts_before_;
  }
  [[nodiscard]] const ModelConfig& model_config() const { return model_->config(); }
  [[nodiscard]] const EngineOptions& options() const { return options_; }
  void check_integrity() const { scheduler_->check_integrity(); }
  /// For tests.
  [[nodiscard]] const PrefixCache& pages() const { return *pages_; }
  [[nodiscard]] const Speculator& speculator() const { return *speculator_; }

 private:
  using Clock = std::chrono::steady_clock;

  EngineCore(std::unique_ptr<Model> model, const EngineOptions& options, ModelRunner runner);

  void warm_up();
  void reset_pages();
  void end_requests();
  [[nodiscard]] bool plan_step();
  void note_admissions();
  void run_plan();
  [[nodiscard]] bool may_run_ahead() const;
  void run_ahead();
  void add_rows(Sequence& sequence, int64_t num_draft);
  enum class Ahead : uint8_t { kNo, kOfItsTokens };  // which the step before samples
  void start(Ahead ahead);
  void sample_late();
  [[nodiscard]] std::optional<Result<SampledToken>> sample(size_t index,
                                                           const Sequence& sequence,
                                                           int64_t drafted);
  [[nodiscard]] Status score_prompt(size_t index, Sequence& sequence);
  [[nodiscard]] Status pool_prompt(size_t index, const ScheduledSequence& item);
  [[nodiscard]] Status read_prompt(size_t index, const ScheduledSequence& item);
  void handle_result(size_t index, const ScheduledSequence& item);
  [[nodiscard]] bool accept_token(Sequence& sequence, SampledToken sampled);
  void verify_draft(size_t index, const ScheduledSequence& item);
  void fail(Sequence& sequence, const Status& failure);
  [[nodiscard]] bool ends_answer(const Sequence& sequence, int32_t token) const;
  [[nodiscard]] std::unique_ptr<Sequence> take_out(Sequence& sequence);
  [[nodiscard]] Status explain(const Status& failure);
  void finish(Sequence& sequence, FinishReason reason, const Status& failure);
  void report_end(Sequence& sequence, FinishReason reason, const Status& failure);

  std::unique_ptr<Model> model_;
  const EngineOptions options_;
  ModelRunner runner_;
  Sampler sampler_;
  MaskFiller masks_;
  SamplingBuilder sampling_;        // of the step being run
  std::vector<size_t> row_owners_;  // of its rows: plan indices
  bool sampled_ = false;            // whether it was sampled by them
  bool late_ = false;               // they wait for masks; the step has been started without them
  bool ahead_ = false;  // the step after plan_ has been started, with the same sequences
  std::unique_ptr<PrefixCache> pages_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<ScheduledSequence> plan_;  // of the step being run
  SamplerInputs inputs_;
  std::unique_ptr<Speculator> speculator_;
  EventOutbox events_;
  std::vector<float> states_;  // scratch
  int64_t next_arrival_ = 0;
  Counts never_admitted_;
  uint64_t unseeded_ = 0;  // state for requests without a seed
  EngineStats counters_;   // prompt, cached and generated tokens, steps
  int64_t past_preemptions_ = 0;
  ExpertCounts experts_before_;       // of steps for no request
  std::optional<Status> not_finite_;  // why logits were not finite; found out once
};

}  // namespace nibble
