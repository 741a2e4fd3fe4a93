#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/client/load_flags.h"
#include "bench/client/serve_table.h"

namespace nibble {

/// A load: how many requests come when.
struct LoadLevel {
  ArrivalOptions arrivals;
  int64_t max_concurrency = 0;
};

/// One measured run.
struct ServeRun {
  std::string label;
  LoadResult result;
  LoadMetrics metrics;
  RunFacts facts;
};

/// What the modes of `nibble bench serve` share: prompts, runs, and what is written of them.
class ServeBench final {
 public:
  /// Reads flags and tokenizer. `flags` must outlive the bench.
  static Result<ServeBench> create(const LoadFlags& flags);

  /// Finds the server at this URL ("": that of the flags).
  [[nodiscard]] Result<Target> open(const std::string& url) const;
  /// One request, until the server is ready, and the warm-ups; of prompts of their own.
  Status warm_up(Target& target) const;
  /// New prompts: other ones for every `round`.
  [[nodiscard]] Result<std::vector<Prompt>> prompts(int64_t round) const;
  [[nodiscard]] LoadLevel level() const;
  /// Sends the prompts and measures.
  ServeRun run(Target& target, const std::vector<Prompt>& prompts, const LoadLevel& level) const;

  [[nodiscard]] const LoadFlags& flags() const { return *flags_; }
  [[nodiscard]] const LoadOptions& options() const { return options_; }
  /// What holds for all runs, for people: where lengths come from, what definitions hold.
  [[nodiscard]] std::string header() const;

 private:
  ServeBench(const LoadFlags& flags, LoadOptions options)
      : flags_(&flags), options_(std::move(options)) {}

  [[nodiscard]] Result<std::vector<Prompt>> make_prompts(int64_t count, uint64_t seed) const;

  const LoadFlags* flags_;
  LoadOptions options_;
  std::shared_ptr<const Tokenizer> tokenizer_;
};

/// Writes --result-file. Lists by request only with --save-detailed.
Status write_result(const LoadFlags& flags, const Json& json);
/// The errors of a run, most frequent first, as lines for people; "" without any.
[[nodiscard]] std::string error_lines(const LoadMetrics& metrics);
/// kUnavailable when every request failed, with the most frequent reason.
[[nodiscard]] Status all_failed(const ServeRun& run);

// The modes.
Status run_single(const ServeBench& bench);
Status run_sweep(const ServeBench& bench);
Status run_compare(const ServeBench& bench);
Status run_gsm8k(const ServeBench& bench);

}  // namespace nibble
