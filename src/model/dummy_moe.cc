#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/source_config.h"
#include "model/dummy_tensors.h"

namespace nibble {
namespace {

constexpr int64_t kMostSize = int64_t{1} << 24;  // of any field: no product of two overflows
constexpr int64_t kFp8Block = 128;
constexpr int64_t kMxGroup = 32;

/// How linear layers are stored.
enum class Storage : uint8_t { kPlain, kInt4Experts, kFp8Blocks, kMxfp4Experts };

enum class Role : uint8_t { kLinear, kRoutedExpert };

class MoeLister final {
 public:
  MoeLister(const Json& config, const DummyMoeOptions& options)
      : config_(config), options_(options) {}

  Result<std::vector<DummyTensor>> list() {
    NIBBLE_RETURN_IF_ERROR(read_storage());
    const std::string& name = options_.architecture;
    prefix_ = name == "KimiK25ForConditionalGeneration" ? "language_model." : "";
    if (name == "GptOssForCausalLM") {
      NIBBLE_RETURN_IF_ERROR(list_layers(&MoeLister::gpt_oss_layer));
    } else if (name == "Qwen3MoeForCausalLM") {
      NIBBLE_RETURN_IF_ERROR(list_layers(&MoeLister::qwen_layer));
    } else {
      NIBBLE_RETURN_IF_ERROR(list_layers(&MoeLister::deepseek_layer));
    }
    return std::move(tensors_);
  }

 private:
  /// A field that must be a size; the first failure is kept.
  int64_t size(std::string_view key) {
    const auto value = JsonReader(config_, options_.where).required_int(key);
    return checked(key, value);
  }

  int64_t size(std::string_view key, int64_t fallback) {
    const auto value = JsonReader(config_, options_.where).optional_int(key, fallback);
    return checked(key, value);
  }

  int64_t checked(std::string_view key, const Result<int64_t>& value) {
    if (!value.ok()) {
      fail(value.status());
      return 1;
    }
    if (*value < 0 || *value > kMostSize) {
      fail(make_error(StatusCode::kCorrupt, "{}: field {}: {} is out of range", options_.where, key,
                      *value));
      return 1;
    }
    return *value;
  }

  void fail(const Status& status) {
    if (status_.ok()) {
      status_ = status;
    }
  }

  Status read_storage() {
    const Json* quant = config_.find("quantization_config");
    if (quant == nullptr || quant->is_null()) {
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(const SourceConfig source, read_source_config(config_, ""));
    const SourceGroup* group = source.groups.size() == 1 ? source.groups.data() : nullptr;
    if (source.method == SourceMethod::kFp8) {
      storage_ = Storage::kFp8Blocks;
      return {};
    }
    if (source.method == SourceMethod::kMxfp4 && options_.architecture == "GptOssForCausalLM") {
      storage_ = Storage::kMxfp4Experts;
      return {};
    }
    if (source.method == SourceMethod::kCompressedTensors && group != nullptr &&
        group->number == SourceGroup::Number::kInt && group->bits == 4 && group->symmetric &&
        group->strategy == SourceGroup::Strategy::kGroup) {
      storage_ = Storage::kInt4Experts;
      group_size_ = group->group_size;
      return {};
    }
    return make_error(StatusCode::kUnsupported,
                      "{}: this form is not made here; give a type with --dtype to leave it out",
                      source.where);
  }

  Status list_layers(void (MoeLister::*layer)(const std::string&, int64_t)) {
    hidden_ = size("hidden_size");
    const int64_t vocabulary = size("vocab_size");
    const int64_t layers = size("num_hidden_layers");
    plain(prefix_ + "model.embed_tokens.weight", {vocabulary, hidden_});
    for (int64_t i = 0; i < layers && status_.ok(); ++i) {
      const std::string module = fmt::format("{}model.layers.{}.", prefix_, i);
      norm(module + "input_layernorm", hidden_);
      norm(module + "post_attention_layernorm", hidden_);
      (this->*layer)(module, i);
    }
    norm(prefix_ + "model.norm", hidden_);
    const auto tied =
        JsonReader(config_, options_.where).optional_bool("tie_word_embeddings", false);
    NIBBLE_RETURN_IF_ERROR(tied.status());
    if (!*tied) {
      plain(prefix_ + "lm_head.weight", {vocabulary, hidden_});
    }
    return status_;
  }

  void deepseek_layer(const std::string& module, int64_t layer) {
    mla_attention(module + "self_attn.");
    const int64_t dense_layers = size("first_k_dense_replace", 0);
    const int64_t every = std::max<int64_t>(size("moe_layer_freq", 1), 1);
    if (layer < dense_layers || layer % every != 0) {
      mlp(module + "mlp.", size("intermediate_size"), Role::kLinear);
      return;
    }
    const int64_t experts = size("n_routed_experts");
    const int64_t width = size("moe_intermediate_size");
    plain(module + "mlp.gate.weight", {experts, hidden_});
    tensors_.push_back({module + "mlp.gate.e_score_correction_bias", DType::kF32, {experts}});
    if (const int64_t shared = size("n_shared_experts", 0); shared > 0) {
      mlp(module + "mlp.shared_experts.", shared * width, Role::kLinear);
    }
    routed_experts(module + "mlp.experts.", experts, width);
  }

  void mla_attention(const std::string& module) {
    const int64_t heads = size("num_attention_heads");
    const int64_t rope = size("qk_rope_head_dim");
    const int64_t nope = size("qk_nope_head_dim");
    const int64_t value = size("v_head_dim");
    const int64_t kv_rank = size("kv_lora_rank");
    if (const int64_t q_rank = size("q_lora_rank", 0); q_rank > 0) {
      linear(module + "q_a_proj", q_rank, hidden_, Role::kLinear);
      norm(module + "q_a_layernorm", q_rank);
      linear(module + "q_b_proj", heads * (nope + rope), q_rank, Role::kLinear);
    } else {
      linear(module + "q_proj", heads * (nope + rope), hidden_, Role::kLinear);
    }
    linear(module + "kv_a_proj_with_mqa", kv_rank + rope, hidden_, Role::kLinear);
    norm(module + "kv_a_layernorm", kv_rank);
    linear(module + "kv_b_proj", heads * (nope + value), kv_rank, Role::kLinear);
    linear(module + "o_proj", hidden_, heads * value, Role::kLinear);
  }

  void qwen_layer(const std::string& module, int64_t /*layer*/) {
    const int64_t head = grouped_attention(module + "self_attn.", false);
    norm(module + "self_attn.q_norm", head);
    norm(module + "self_attn.k_norm", head);
    const int64_t experts = size("num_experts");
    plain(module + "mlp.gate.weight", {experts, hidden_});
    routed_experts(module + "mlp.experts.", experts, size("moe_intermediate_size"));
  }

  void gpt_oss_layer(const std::string& module, int64_t /*layer*/) {
    grouped_attention(module + "self_attn.", true);
    plain(module + "self_attn.sinks", {size("num_attention_heads")});
    const int64_t experts = size("num_local_experts");
    const int64_t width = size("intermediate_size");
    plain(module + "mlp.router.weight", {experts, hidden_});
    plain(module + "mlp.router.bias", {experts});
    fused(module + "mlp.experts.gate_up_proj", experts, 2 * width, hidden_);
    fused(module + "mlp.experts.down_proj", experts, hidden_, width);
  }

  /// Returns the width of a head.
  int64_t grouped_attention(const std::string& module, bool biases) {
    const int64_t heads = std::max<int64_t>(size("num_attention_heads"), 1);
    const int64_t kv_heads = size("num_key_value_heads", heads);
    const int64_t head = size("head_dim", hidden_ / heads);
    const std::pair<const char*, int64_t> inputs[] = {
        {"q_proj", heads * head}, {"k_proj", kv_heads * head}, {"v_proj", kv_heads * head}};
    for (const auto& [name, rows] : inputs) {
      linear(module + name, rows, hidden_, Role::kLinear);
      if (biases) {
        plain(module + name + ".bias", {rows});
      }
    }
    linear(module + "o_proj", hidden_, heads * head, Role::kLinear);
    if (biases) {
      plain(module + "o_proj.bias", {hidden_});
    }
    return head;
  }

  // All experts in one tensor: MXFP4 [e, rows, columns / 32, 16], else [e, columns, rows].
  void fused(const std::string& name, int64_t experts, int64_t rows, int64_t columns) {
    if (storage_ != Storage::kMxfp4Experts) {
      plain(name, {experts, columns, rows});
    } else if (columns % kMxGroup != 0) {
      fail(make_error(StatusCode::kUnsupported, "{}: {} input channels are no multiple of 32", name,
                      columns));
    } else {
      const int64_t groups = columns / kMxGroup;
      tensors_.push_back(
          {name + "_blocks", DType::kU8, {experts, rows, groups, 16}, DummyContent::kE2M1Codes});
      tensors_.push_back(
          {name + "_scales", DType::kU8, {experts, rows, groups}, DummyContent::kE8M0Scales});
    }
    plain(name + "_bias", {experts, rows});
  }

  void routed_experts(const std::string& module, int64_t experts, int64_t width) {
    for (int64_t i = 0; i < experts && status_.ok(); ++i) {
      mlp(fmt::format("{}{}.", module, i), width, Role::kRoutedExpert);
    }
  }

  void mlp(const std::string& module, int64_t width, Role role) {
    linear(module + "gate_proj", width, hidden_, role);
    linear(module + "up_proj", width, hidden_, role);
    linear(module + "down_proj", hidden_, width, role);
  }

  void norm(const std::string& module, int64_t width) {
    tensors_.push_back({module + ".weight", options_.dtype, {width}, DummyContent::kOnes});
  }

  void plain(const std::string& name, std::vector<int64_t> shape) {
    tensors_.push_back({name, options_.dtype, std::move(shape)});
  }

  void linear(const std::string& module, int64_t n, int64_t k, Role role) {
    if (storage_ == Storage::kFp8Blocks) {
      tensors_.push_back({module + ".weight", DType::kF8E4M3, {n, k}, DummyContent::kE4M3Codes});
      tensors_.push_back({module + ".weight_scale_inv",
                          DType::kF32,
                          {(n + kFp8Block - 1) / kFp8Block, (k + kFp8Block - 1) / kFp8Block},
                          DummyContent::kE4M3Scales});
    } else if (storage_ == Storage::kInt4Experts && role == Role::kRoutedExpert) {
      if (k % group_size_ != 0 || k % 8 != 0) {
        fail(make_error(StatusCode::kUnsupported,
                        "{}: {} input channels are no multiple of 8 and of the group size {}",
                        module, k, group_size_));
      }
      tensors_.push_back(
          {module + ".weight_packed", DType::kI32, {n, k / 8}, DummyContent::kInt4Codes});
      tensors_.push_back({module + ".weight_scale",
                          options_.dtype,
                          {n, k / group_size_},
                          DummyContent::kInt4Scales});
      tensors_.push_back({module + ".weight_shape", DType::kI32, {2}, DummyContent::kShape, n, k});
    } else {
      plain(module + ".weight", {n, k});
    }
  }

  const Json& config_;
  const DummyMoeOptions& options_;
  Storage storage_ = Storage::kPlain;
  int64_t group_size_ = 0;
  std::string prefix_;
  int64_t hidden_ = 0;
  Status status_;
  std::vector<DummyTensor> tensors_;
};

constexpr std::array<std::string_view, 4> kArchitectures = {
    "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Qwen3MoeForCausalLM",
    "GptOssForCausalLM"};

}  // namespace

bool is_moe_architecture(std::string_view architecture) {
  return std::find(kArchitectures.begin(), kArchitectures.end(), architecture) !=
         kArchitectures.end();
}

Result<std::vector<DummyTensor>> list_moe_tensors(const Json& config,
                                                  const DummyMoeOptions& options) {
  return MoeLister(config, options).list();
}

}  // namespace nibble
