#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "arch/config.h"
#include "arch/role.h"
#include "base/json.h"
#include "base/status.h"

namespace nibble::gguf {
class Metadata;
}

namespace nibble {

/// The module of a role, with {} for the layer and a second {} for the expert:
/// "model.layers.{}.self_attn.q_proj".
struct RoleName {
  Role role;
  std::string_view module;
};

/// How a tensor that holds a projection of all experts of a layer lies: [experts, out, in], gate
/// and up in halves of `out`, unless said otherwise.
struct FusedExperts {
  bool transposed = false;   // [experts, in, out]
  bool interleaved = false;  // gate and up in turns
  bool published = false;    // checkpoints of the family store experts so, not one by one
};

/// What the ready-made rules of the quantizer take.
enum class WorthQuantizing : uint8_t {
  kLinearLayers,
  kRoutedExperts,           // nearly all of the weights: only these are worth a loss
  kRoutedExpertsUnlessFp8,  // and everything to FP8, which the model was trained in
};

/// What GGUF files of a family are like.
struct GgufForm {
  std::string_view architecture;         // general.architecture, which begins its keys
  std::span<const RoleName> names = {};  // that differ from those of most families
  // Rows of q and k of a head lie in pairs that are rotated together: 0, half, 1, half + 1, ...
  bool paired_rows = false;
  bool experts = false;  // its files have mixtures of experts: expert_count is not 0
  bool expert_biases = false;
  /// Adds the family's own fields to the config.json that the metadata give, windows among them;
  /// null: it has none, and windows are refused.
  Status (*add_fields)(const gguf::Metadata& metadata, Json& config) = nullptr;
};

/// What one family of models has to itself: facts that loader, quantizer, reader and random
/// checkpoints ask. One row per file of families/.
struct Family {
  std::string_view name;          // in reports: "kimi_k2"
  std::string_view architecture;  // of config.json's "architectures"
  std::string_view model_type;    // of config.json
  /// Reads the family's own fields of config.json. The shared ones are already in `config`.
  Status (*read_fields)(const Json& json, const JsonReader& reader, ModelConfig& config);
  std::span<const RoleName> names = {};  // that differ from those of most decoders
  std::string_view prefix = {};          // before all names
  // What names of tensors begin with that another model beside this one has, such as one of images.
  std::span<const std::string_view> others = {};
  const Family* renamed = nullptr;  // the same with the names that other files give, if any
  std::string_view width_field = "intermediate_size";  // of config.json
  std::string_view hidden_act = "silu";                // the one value that the field may have
  std::string_view eps_field = "rms_norm_eps";
  double default_eps = 1e-6;
  bool kv_heads_may_be_absent = false;     // then there are as many as query heads
  int64_t default_head_dim = 0;            // 0: hidden_size / heads
  DType default_dtype = DType::kF32;       // of the model, where config.json does not say
  std::optional<FusedExperts> fused = {};  // absent: tensors of all experts are not known
  WorthQuantizing worth = WorthQuantizing::kLinearLayers;
  std::optional<GgufForm> gguf = {};  // absent: GGUF files of it are not read
};

/// The family of a config.json by its first architecture; among several of one architecture that
/// of the model_type. kUnsupported with the list of known architectures; kCorrupt when the
/// model_type is that of another family.
Result<const Family*> find_family(std::string_view architecture,
                                  std::string_view model_type,
                                  std::string_view where);

/// The same for those who go on without: by model_type, at the top or in text_config, else by
/// architecture; nullptr when neither is known.
[[nodiscard]] const Family* guess_family(const Json& config);

/// The family of GGUF files with this general.architecture, and with experts or without;
/// kUnsupported with the list of those that are known.
enum class GgufExperts : bool { kNone, kSome };
Result<const Family*> find_gguf_family(std::string_view architecture,
                                       GgufExperts experts,
                                       std::string_view where);

/// The family or its `renamed` one, by which of their embeddings `stored` knows; the family itself
/// when it knows neither.
[[nodiscard]] const Family* family_as_stored(
    const Family* family, const std::function<bool(std::string_view tensor)>& stored);

/// "model.layers.7.mlp.up_proj". The role must have a name in this family.
[[nodiscard]] std::string module_name(const Family& family,
                                      Role role,
                                      int64_t layer = 0,
                                      int64_t expert = 0);
/// Whether a tensor of this name belongs to a model beside the one that the family describes.
[[nodiscard]] bool of_another_model(const Family& family, std::string_view tensor);
/// What the names of a layer's modules begin with: "model.layers.7.".
[[nodiscard]] std::string layer_prefix(const Family& family, int64_t layer);
/// The first number of a module that is `pattern` with a number for each {}, 0 where it has none;
/// nothing for another module or a number beyond 64 bits.
[[nodiscard]] std::optional<int64_t> number_of(std::string_view pattern, std::string_view module);
/// The role of a module by its name; nothing for one that no pattern of the family fits.
[[nodiscard]] std::optional<Role> role_of(const Family& family, std::string_view module);

/// The rule of Qwen2 and Qwen3: layer_types says which layers have a window; without it those from
/// max_window_layers on, if use_sliding_window. One entry per layer, 0 for full attention.
Result<std::vector<int64_t>> read_qwen_windows(const Json& json,
                                               const JsonReader& reader,
                                               int64_t num_layers);

/// kCorrupt, naming the field, for experts that cannot be chosen: none, fewer than a token takes,
/// or groups that do not divide them; kUnsupported for more than a router chooses from.
Status check_experts_fields(const JsonReader& reader, const ModelConfig& config);

/// Experts of the Qwen families: which layers have them, how many, how wide, and how they are
/// weighed.
Status read_qwen_experts(const Json& json, const JsonReader& reader, ModelConfig& config);

/// The rule of Mistral: sliding_window for every layer, none where it is null; `fallback` where it
/// is absent.
Result<std::vector<int64_t>> read_one_window(const Json& json,
                                             const JsonReader& reader,
                                             int64_t num_layers,
                                             int64_t fallback);

/// The rule of families that have a window in every other layer unless layer_types says otherwise.
Result<std::vector<int64_t>> read_layer_windows(const Json& json,
                                                const JsonReader& reader,
                                                int64_t num_layers);

/// A field that must be a size: kCorrupt unless it is 0 or more and far below overflow.
Result<int64_t> read_count(const JsonReader& reader, std::string_view key);
Result<int64_t> read_count(const JsonReader& reader, std::string_view key, int64_t fallback);

/// Rotation parameters: rope_parameters of transformers 5, or rope_scaling and rope_theta of
/// transformers 4. kUnsupported names a type or field that this build cannot honour.
Result<RopeConfig> read_rope_config(const Json& json,
                                    const JsonReader& reader,
                                    int64_t max_position);

}  // namespace nibble
