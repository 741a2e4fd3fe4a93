#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/speculation.h"
#include "engine/step_sizes.h"
#include "model/model.h"

namespace nibble {

struct EngineOptions {
  int64_t max_model_len = 0;  // 0: the model's max_position
  // Sizes of 0 are those that the device does well with (preferred_sizes()), as `prefer` says.
  int64_t max_num_seqs = 0;            // running at once
  int64_t max_num_batched_tokens = 0;  // tokens of one step: decodes first, then prefill chunks
  int64_t max_mixed_prefill = 0;       // of these, of prompts, where others decode in the step
  Preference prefer = Preference::kTtft;
  int64_t max_queued_requests = 1024;
  // Rows of logits that prompts may have in a step, beside one for each sequence: prompts whose
  // tokens are scored are cut into steps by it. 0: as many as kPromptLogitBytes hold.
  int64_t max_prompt_rows = 0;
  Speculation speculation;  // its tokens need such rows, too
  int64_t page_size = 0;    // 0: what the backend likes best
  int64_t num_pages = 0;    // of each pool; 0: enough for max_num_seqs sequences, at most kv_bytes
  int64_t kv_bytes = 0;     // 0: 1 GiB of host memory, or what a GPU has left
  int64_t draft_kv_bytes = 0;  // of kv_bytes, for a draft model; resolve_in_memory() finds it
  KvCode kv_code = KvCode::kBf16;
  bool ignore_fmpq = false;  // see ModelOptions
  bool prefix_caching = true;
  std::optional<uint64_t> seed;          // of requests without one; absent: the system chooses
  bool warm_up = false;                  // before the first request, where first steps are slow
  std::vector<int64_t> pool_pages = {};  // resolving finds them: of each pool of the cache
};

inline constexpr int64_t kHostKvBytes = int64_t{1} << 30;
inline constexpr int64_t kPromptLogitBytes = int64_t{128} << 20;

/// Pages of one pool of the cache.
struct PoolStats {
  int64_t window = 0;                       // of its layers; 0: none
  int64_t pages_total = 0, pages_used = 0;  // used: held by sequences (cached free pages are free)
};

/// Counters and gauges since start; a consistent copy.
struct EngineStats {
  int64_t running = 0, waiting = 0;
  std::vector<PoolStats> pools;
  int64_t pages_total = 0, pages_used = 0;  // of all pools
  int64_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;
  int64_t preemptions = 0, steps = 0;
  SpeculationStats speculation;
  ExpertCounts experts;  // at most a second old while steps run
  bool healthy = true;
  std::string failure;  // why it is not
};

/// Continuous batching over one model. One engine thread owns scheduler, sequences and page tables;
/// requests enter through a bounded queue and tokens leave through Request::on_event.
class Engine {
 public:
  /// Fills in defaults and makes limits agree: max_model_len is at most what all pages hold,
  /// max_num_batched_tokens at least max_num_seqs. kInvalidArgument names the bad field. Without a
  /// backend, sizes are those of CPUs.
  static Result<EngineOptions> resolve_options(const EngineOptions& options,
                                               const ModelConfig& config,
                                               const Backend* backend = nullptr);
  /// Resolves `options` and starts the thread. The model must have been loaded for steps of
  /// max_num_batched_tokens tokens and the rows of logits that model_options() says; a `draft`
  /// model, which proposes tokens, as DraftModel::model_options() does.
  static Result<std::unique_ptr<Engine>> start(std::unique_ptr<Model> model,
                                               const EngineOptions& options,
                                               std::unique_ptr<Model> draft = nullptr);
  virtual ~Engine() = default;  // cancels what runs and joins the thread

  /// Thread-safe. kInvalidArgument: empty prompt, token id out of range, prompt longer than
  /// max_model_len less one token of answer, if any is wanted, or one that could never fit the
  /// pages; kResourceExhausted: so many requests of its client wait already; kUnavailable: shutting
  /// down or unhealthy.
  virtual Status submit(Request request) = 0;
  /// Stops taking requests; returns when all that were taken are finished or `timeout_s` is over
  /// (the rest is cancelled then).
  virtual void drain(double timeout_s) = 0;
  /// Requests submitted from now on find no prefix of earlier ones in the cache. Thread-safe.
  virtual void forget_prefixes() = 0;
  [[nodiscard]] virtual EngineStats stats() const = 0;
  [[nodiscard]] virtual const ModelConfig& model_config() const = 0;
  [[nodiscard]] virtual const EngineOptions& options() const = 0;  // with defaults resolved
};

}  // namespace nibble
