#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "arch/config.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/linear_reader.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/source_matrix.h"
#include "core/expert_share.h"
#include "model/fmpq_inputs.h"
#include "model/weight_maker.h"
#include "quant/kv_formats.h"
#include "quant/quant_tensor.h"

namespace nibble {

/// What the activations of a linear layer are rounded to in a model of this type: to BF16 where it
/// is the model's and the file says nothing.
[[nodiscard]] ActFormat activations_of(const MappedLinear& part, DType model);

/// Reads a model's tensors by module name, checks their shapes, and remembers what was used, so
/// that a checkpoint with weights that the model would ignore is refused.
class WeightLoader final {
 public:
  /// `runs`: what of a GGUF file stays as it is; everything else in blocks becomes BF16. `fmpq`:
  /// what is done with a sidecar of 4-bit activations, if the folder has one.
  static Result<WeightLoader> open(const std::string& model_dir,
                                   const ModelConfig& config,
                                   RunsFormat runs = nullptr,
                                   FmpqUse fmpq = FmpqUse::kApplied);

  /// Weights that are made, not read; the maker must outlive the loader.
  ///   path: for messages
  static WeightLoader of_made(const std::string& path,
                              const ModelConfig& config,
                              WeightMaker& maker);

  /// The model's, its family being that whose names the files have (family_as_stored()).
  [[nodiscard]] const ModelConfig& config() const { return config_; }

  /// A linear layer's weights [n, k], in the mapped file. kCorrupt naming the tensor for another
  /// shape.
  Result<MappedLinear> linear(const std::string& module, int64_t n, int64_t k);
  /// From now on linear() and experts() give these weights for the module, whatever the file holds.
  void substitute(const std::string& module, QuantTensor weight, const ActSpec& act);
  /// How the input of a module with k columns is turned: nibble::turn_of().
  [[nodiscard]] Result<int64_t> turn_of(const std::string& module, int64_t k) const {
    return nibble::turn_of(quant_config_.turned, module, k);
  }
  /// Lets all of those go.
  void drop_substitutes() { substitutes_.clear(); }
  /// The same of projections of routed experts, by several threads: map_expert_weights().
  struct ExpertModule {
    std::string module;
    int64_t n = 0;
    int64_t k = 0;
  };
  Result<std::vector<MappedLinear>> experts(std::span<const ExpertModule> modules);
  /// A table [n, k] that a GGUF file has in blocks, in the mapped file; null where it is stored
  /// otherwise.
  Result<std::unique_ptr<SourceMatrix>> block_table(const std::string& module,
                                                    int64_t n,
                                                    int64_t k);
  /// An unquantized table [n, k], in the mapped file; of a GGUF file decoded.
  Result<QuantView> table(const std::string& module, int64_t n, int64_t k);
  /// A vector [n] in F32, F16 or BF16 as f32. kCorrupt when a number is NaN or infinite.
  Result<std::vector<float>> vector(const std::string& tensor, int64_t n);
  /// The same of a tensor of this shape.
  Result<std::vector<float>> numbers(const std::string& tensor, const std::vector<int64_t>& shape);
  /// The scales of a layer's FP8 cache, if some are stored: read_kv_scales().
  Result<std::optional<KvScales>> kv_scales(int64_t layer);
  /// The module whose weights are the output head: the file's own lm_head, or the embedding where
  /// tie_word_embeddings says so and the file has no lm_head, or the same numbers once more.
  Result<std::string> head_module();
  /// Appends vector(module + ".bias") to `bias`.
  Status append_bias(const std::string& module, int64_t n, std::vector<float>& bias);

  /// Of all tensors.
  [[nodiscard]] int64_t total_bytes() const { return reader_ ? reader_->total_bytes() : 0; }
  /// What keeps mapped weights in place.
  [[nodiscard]] std::shared_ptr<const void> files() const { return kept_; }
  /// Starts to read a module's tensors, or those of a layer that will be loaded, into the system's
  /// cache; layers that there are not have none.
  void read_ahead(const std::string& module) const;
  void read_ahead(int64_t layer);
  /// Of experts of other devices nothing is read ahead.
  void use(const ExpertShare& share) { share_ = share; }
  /// Lets pages go that were read of a layer's tensors; the system's cache keeps them.
  void release(std::span<const MappedLinear> parts) const;

  void release_all() const;
  /// Says in the log what was decoded, how much memory that takes, and what to do instead.
  void report_decoded() const;

  /// kUnsupported naming the first tensor that nothing asked for and that may not stay unread.
  [[nodiscard]] Status check_all_used() const;

 private:
  /// What mapped weights and tables point into.
  struct Kept {
    std::optional<CheckpointReader> reader;
    std::vector<Buffer> tables;
  };
  struct Decoded {
    std::set<std::string> types;
    int64_t stored_bytes = 0;
    int64_t bytes = 0;
  };

  struct Substitute {
    QuantTensor weight;
    ActSpec act;
  };
  /// Names, also looked up by views of them.
  struct NameHash {
    using is_transparent = void;
    size_t operator()(std::string_view name) const { return std::hash<std::string_view>()(name); }
  };
  using NameSet = std::unordered_set<std::string, NameHash, std::equal_to<>>;

  WeightLoader(std::optional<CheckpointReader> reader,
               QuantConfig quant_config,
               const ModelConfig& config);
  Result<MappedLinear> map(const std::string& module, int64_t n, int64_t k, const RunsFormat& runs);
  [[nodiscard]] std::optional<MappedLinear> substituted(const std::string& module) const;
  /// Checks the shape of what was mapped, and notes it.
  Result<MappedLinear> use(Result<MappedLinear> weights,
                           const std::string& module,
                           int64_t n,
                           int64_t k);

  /// Of the file; none where weights are made.
  [[nodiscard]] const std::vector<const TensorInfo*>& tensors() const;
  /// The tensors of each layer that will be loaded.
  [[nodiscard]] std::vector<std::vector<const TensorInfo*>> sort_by_layer() const;
  /// "FILE: tensor NAME" of a linear layer's weights.
  [[nodiscard]] std::string where_weight(const std::string& module) const;

  std::shared_ptr<Kept> kept_;
  const CheckpointReader* reader_;  // in kept_; null where weights are made
  WeightMaker* maker_ = nullptr;    // null where they are read
  RunsFormat runs_;
  std::unique_ptr<ThreadPool> pool_;  // once there are experts
  Decoded decoded_;
  QuantConfig quant_config_;
  FmpqInputs fmpq_;
  ModelConfig config_;
  std::map<std::string, Substitute> substitutes_;
  ExpertShare share_;
  std::vector<std::vector<const TensorInfo*>> of_layers_;  // once one was read ahead
  NameSet modules_;                                        // that were asked for
  std::vector<const TensorInfo*> used_;
  std::set<std::string> dropped_;  // what was said once
};

}  // namespace nibble
