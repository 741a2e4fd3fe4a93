#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "arch/family.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/source_coded.h"
#include "checkpoint/source_plain.h"

namespace nibble {

/// "model.layers.0.mlp.up_proj" and "weight"; the whole name is the suffix when it has no dot.
struct SplitName {
  std::string_view module;
  std::string_view suffix;
};
[[nodiscard]] SplitName split_name(std::string_view name);

/// What the functions that recognise stored matrices share.
struct SourceContext {
  const CheckpointReader& reader;
  const QuantConfig& config;

  /// Tensor "module.suffix", or nullptr.
  [[nodiscard]] const TensorInfo* find(std::string_view module, std::string_view suffix) const;
  /// kCorrupt naming the codes, whose scales these are.
  [[nodiscard]] Result<const TensorInfo*> require(const TensorInfo& codes,
                                                  std::string_view module,
                                                  std::string_view suffix) const;
  /// The group that targets a module; kCorrupt when there is none.
  [[nodiscard]] Result<const QuantGroup*> group_for(const TensorInfo& codes,
                                                    std::string_view module) const;
  [[nodiscard]] Status corrupt(const TensorInfo& tensor, const std::string& what) const;
  [[nodiscard]] Status unsupported(const TensorInfo& tensor, const std::string& what) const;
  /// kCorrupt unless the tensor has this type and shape.
  [[nodiscard]] Status expect(const TensorInfo& tensor,
                              DType dtype,
                              const std::vector<int64_t>& shape) const;
  /// kCorrupt unless it has two dimensions, neither of them zero.
  [[nodiscard]] Status expect_matrix(const TensorInfo& tensor) const;
};

/// How the scales of a matrix may lie; facts.n and facts.k are known before.
enum class ScaleGrid : uint8_t {
  kTensor,   // one number
  kChannel,  // [n], [n, 1]
  kGroup,    // [n, groups]
  kColumns,  // [groups, n]
};
/// Which types of scales a layout knows.
enum class ScaleTypes : uint8_t { kFloats, kE4M3, kE8M0 };

/// Checks type and shape of scales and enters them as facts.scale. `group_size` counts for groups.
Status use_scales(const SourceContext& context,
                  const TensorInfo& scale,
                  ScaleGrid grid,
                  ScaleTypes types,
                  CodedFacts& facts);
/// The same for blocks of rows and columns; partial blocks at the edges have scales of their own.
Status use_block_scales(const SourceContext& context,
                        const TensorInfo& scale,
                        int64_t block_rows,
                        int64_t block_columns,
                        CodedFacts& facts);
/// One number of F32, F16 or BF16 that all scales are multiplied with, or divided by.
Status use_outer_scale(const SourceContext& context, const TensorInfo& scale, CodedFacts& facts);
/// Sets facts.group_size. kCorrupt when the columns are no multiple of it, unless they are fewer.
Status use_groups(const SourceContext& context,
                  const TensorInfo& codes,
                  int64_t group_size,
                  CodedFacts& facts);
/// Rows of whole bytes or words: n and k follow from the shape of `codes`, whose elements hold
/// `per_element` codes.
Status use_rows(const SourceContext& context,
                const TensorInfo& codes,
                CodeForm form,
                int64_t per_element,
                CodedFacts& facts);

/// What the codes in tensor "X.weight_packed", "X.qweight" or "X.weight" of module X mean, in the
/// dialect of the config. kCorrupt when other codes of X stand beside them.
Result<CodedFacts> stored_facts(const SourceContext& context,
                                const TensorInfo& codes,
                                const std::string& module);
/// kCorrupt when scales stand beside the plain matrix "X.weight".
Status check_plain_alone(const SourceContext& context,
                         const TensorInfo& tensor,
                         const std::string& module);

/// "X.weight_packed": compressed-tensors.
Result<CodedFacts> packed_facts(const SourceContext& context,
                                const TensorInfo& codes,
                                const std::string& module);
/// "X.qweight": GPTQ and AWQ.
Result<CodedFacts> word_facts(const SourceContext& context,
                              const TensorInfo& codes,
                              const std::string& module);
/// "X.weight" of a type that needs scales: compressed-tensors, FP8, ModelOpt and Quark.
Result<CodedFacts> weight_facts(const SourceContext& context,
                                const TensorInfo& codes,
                                const std::string& module);
Result<CodedFacts> quark_facts(const SourceContext& context,
                               const TensorInfo& codes,
                               const std::string& module,
                               const QuantGroup& group);
/// FP8 codes whose scales `group` describes.
Result<CodedFacts> fp8_facts(const SourceContext& context,
                             const TensorInfo& codes,
                             const std::string& module,
                             const QuantGroup& group);

using SourceList = std::vector<std::unique_ptr<SourceMatrix>>;

inline constexpr std::string_view kBlocksSuffix = "_blocks";
inline constexpr std::string_view kScalesSuffix = "_scales";
/// "X_blocks" of all experts of a layer (gpt-oss): the matrices of each, appended to `out`.
Status append_expert_blocks(const SourceContext& context,
                            const TensorInfo& blocks,
                            SourceList& out);

/// What says how tensors of all experts lie.
struct FusedModel {
  const Family* family = nullptr;  // nullptr: not known
  int64_t hidden_size = 0;
};
/// Whether a plain tensor [experts, ...] holds projections whose orientation the family tells.
[[nodiscard]] bool is_fused_experts(const TensorInfo& tensor, const FusedModel& model);
Status append_fused_experts(const SourceContext& context,
                            const TensorInfo& tensor,
                            const FusedModel& model,
                            SourceList& out);

/// A projection of one expert within a tensor of all experts: codes, or numbers.
struct ExpertPlace {
  std::optional<CodedFacts> coded;
  std::optional<PlainLayout> plain;
};
/// Where a tensor of all experts has the matrix of a module "X.experts.3.up_proj"; nothing where
/// none does, and the module has tensors of its own.
Result<std::optional<ExpertPlace>> find_fused_expert(const SourceContext& context,
                                                     const std::string& module,
                                                     const FusedModel& model);

}  // namespace nibble
