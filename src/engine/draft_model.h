#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/model_runner.h"
#include "engine/sampling_builder.h"
#include "ops/sampler.h"

namespace nibble {

/// What a draft model has of a sequence: its tokens so far, and pages of the draft model's cache,
/// which are given back with it.
struct DraftShadow {
  explicit DraftShadow(std::shared_ptr<PrefixCache> cache_pages) : pages(std::move(cache_pages)) {}
  ~DraftShadow();
  DraftShadow(const DraftShadow&) = delete;
  DraftShadow& operator=(const DraftShadow&) = delete;

  Sequence sequence;
  std::shared_ptr<PrefixCache> pages;
};

/// A small model of the same vocabulary that proposes what may follow: it reads the sequences in a
/// cache of its own, and samples each token as the engine would, with the same random number, so
/// that a model like the one it proposes for often says the same, at any temperature. Whatever it
/// says, the engine samples from its own logits.
class DraftModel final {
 public:
  struct Wish {
    Sequence* sequence = nullptr;  // all of it but the last token is computed
    int64_t count = 0;             // tokens, at least 1
  };
  /// What the token is sampled by that comes `ahead` tokens behind a sequence.
  using InputOf = std::function<SamplerInput(const Sequence& sequence, int64_t ahead)>;
  /// Passes of a token or two for each sequence.
  struct Work {
    int64_t passes = 0;
    double seconds = 0;
  };

  /// How the model must be loaded, and the sequences that it can have at a time.
  [[nodiscard]] static ModelOptions model_options(const EngineOptions& options);
  /// `options` must be resolved; the cache takes options.draft_kv_bytes at most, where that is not
  /// 0. kResourceExhausted when its memory is not to be had.
  static Result<std::unique_ptr<DraftModel>> create(std::unique_ptr<Model> model,
                                                    const EngineOptions& options);

  /// Fills in Sequence::draft of at most kMostSpeculatedRows sequences, one token of each in a
  /// pass. What it has not read of a sequence it reads first, at most a step's tokens in a call:
  /// such a sequence, and one for which no pages are left, gets fewer proposals or none.
  Work propose(std::span<const Wish> wishes, const InputOf& input);

  [[nodiscard]] const ModelConfig& config() const { return model_->config(); }
  /// For tests.
  [[nodiscard]] const PrefixCache& pages() const { return *pages_; }

 private:
  DraftModel(std::unique_ptr<Model> model, const EngineOptions& options, ModelRunner runner);

  [[nodiscard]] static Sequence& follow(DraftShadow& shadow, const Sequence& sequence);
  [[nodiscard]] bool grow(Sequence& shadow, int64_t tokens);
  void begin(std::span<const Wish> wishes);
  void run_pass(const InputOf& input);
  [[nodiscard]] std::optional<int32_t> sample(size_t index, const InputOf& input);
  void take_results(const InputOf& input);

  struct Job {
    Wish wish;
    Sequence* shadow = nullptr;
  };

  std::unique_ptr<Model> model_;
  const EngineOptions options_;
  ModelRunner runner_;
  Sampler sampler_;
  SamplingBuilder sampling_;  // of the pass under way
  bool sampled_ = false;      // whether the model samples by it
  std::shared_ptr<PrefixCache> pages_;
  std::vector<Job> jobs_;                // of the pass under way
  std::vector<ScheduledSequence> plan_;  // their shadows
};

}  // namespace nibble
