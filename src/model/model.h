#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "arch/config.h"
#include "backend/backend.h"
#include "base/check.h"
#include "core/expert_share.h"
#include "kvcache/paged_kv_cache.h"
#include "quant/act_spec.h"
#include "quant/quant_tensor.h"

namespace nibble {

struct ModelOptions {
  int64_t max_batch_tokens = 512;  // largest tokens.size() of a step; workspace is sized here
  int64_t max_logit_rows = 64;     // largest logit_rows.size() of a step
  int64_t max_sequences = 0;       // of a step; 0: as many as max_logit_rows
  // Of the caches that it will compute on: where the format has HeadForm, layers take what the
  // folder's sidecar says (checkpoint/kv_sidecar.h).
  KvCode kv_code = KvCode::kBf16;
  bool ignore_fmpq = false;  // activations stay as they are: checkpoint/fmpq_sidecar.h
  // Of other devices' experts nothing is loaded, and layers add nothing for them: to measure what
  // one of several devices computes.
  ExpertShare experts = {};
};

/// A loaded decoder-only transformer. forward() allocates nothing and is called by one thread.
class Model {
 public:
  virtual ~Model() = default;
  [[nodiscard]] virtual const ModelConfig& config() const = 0;
  /// Scheme of the linear layers ("w4a16_g32"), and bytes that one decoded token reads.
  [[nodiscard]] virtual std::string_view scheme() const = 0;
  [[nodiscard]] virtual int64_t weight_bytes() const = 0;

  /// kCorrupt naming the first stored weight that is NaN or infinite. Reads the whole checkpoint:
  /// to explain logits that are not finite.
  [[nodiscard]] virtual Status check_weights() const { return {}; }

  /// A cache in the memory that the model computes in.
  virtual Result<PagedKvCache> make_cache(const KvCacheShape& shape) {
    return PagedKvCache::allocate(shape);
  }
  /// Appends the batch's keys and values to `cache` and writes logits [logit_rows, vocab_size] f32,
  /// rounded to BF16 when that is the model's dtype: as in transformers and vLLM, near ties are
  /// ties.
  virtual void forward(const StepInput& batch, PagedKvCache& cache, std::span<float> logits) = 0;
  /// Final hidden states of rows of the step that forward() computed last: normed, what the head
  /// multiplies, but not rounded.
  ///   first: the first of the rows
  ///   out: [rows, hidden_size] f32
  virtual void final_states(int64_t /*first*/, std::span<float> /*out*/) {
    CHECK_MSG(false, "this model shows no hidden states");
  }
  /// Whether start() and finish() may be called.
  [[nodiscard]] virtual bool samples_tokens() const { return false; }
  /// Backend::first_steps_are_slow().
  [[nodiscard]] virtual bool first_steps_are_slow() const { return false; }
  /// forward(), but the logits stay where they are: tokens are sampled there, one for each of
  /// logit_rows, and finish() gives them. Need not wait: one more step may be started before this
  /// one is finished, and its tokens may be this one's samples (batch.fed). An input without rows
  /// leaves the logits as they are: then a batch without tokens, whose logit_rows are as many,
  /// comes before anything else, and its input says how they are sampled.
  virtual void start(const StepInput& /*batch*/,
                     PagedKvCache& /*cache*/,
                     const SamplingInput& /*input*/) {
    CHECK_MSG(false, "this model samples no tokens");
  }
  /// Waits for the earliest step that was started.
  ///   out: as many as its logit_rows
  virtual void finish(std::span<SampledRow> /*out*/) {
    CHECK_MSG(false, "this model samples no tokens");
  }
  /// Backend::expert_counts().
  [[nodiscard]] virtual ExpertCounts expert_counts() const { return {}; }
};

/// Loads a Hugging Face checkpoint folder (config.json, safetensors). The architecture and the
/// scheme follow from the files; what they do not say clearly is refused, naming file and field.
/// The errors of read_kv_sidecar() for options.kv_code that needs one.
Result<std::unique_ptr<Model>> load_model(const std::string& model_dir,
                                          Backend& backend,
                                          const ModelOptions& options);

/// Weights of a module ("model.layers.0.mlp.up_proj") in place of those in the file.
struct ReplacedWeights {
  std::string module;
  QuantTensor weight;
  ActSpec act;
};
/// The same with some weights replaced: what a model would be with another form of these. What
/// else the folder stores of them is not looked at.
Result<std::unique_ptr<Model>> load_model(const std::string& model_dir,
                                          Backend& backend,
                                          const ModelOptions& options,
                                          std::vector<ReplacedWeights> replaced);

}  // namespace nibble
