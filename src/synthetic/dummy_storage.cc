#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "arch/family.h"
#include "arch/tensors.h"
#include "checkpoint/dialect.h"
#include "checkpoint/linear_slots.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/quant_config_writer.h"
#include "quantizer/plan_config.h"
#include "quantizer/rules.h"
#include "synthetic/dummy_tensors.h"

namespace nibble {
namespace {

constexpr int64_t kFp8Block = 128;
constexpr int64_t kMxGroup = 32;

/// How linear layers are stored.
enum class Storage : uint8_t { kPlain, kInt4Experts, kFp8Blocks, kMxfp4Experts };

/// What a tensor of a quantized linear layer holds.
DummyContent content_of(const TensorSlot& slot, WeightCode code, Dialect dialect) {
  const bool quark = dialect == Dialect::kQuark;
  if (slot.suffix == "weight_shape") {
    return DummyContent::kShape;
  }
  const bool scale = slot.suffix.starts_with("weight_scale");
  switch (code) {
    case WeightCode::kInt4:
      if (quark && scale) {
        return slot.suffix == "weight_scale" ? DummyContent::kE4M3Scales
                                             : DummyContent::kInt4OfFp8Scales;
      }
      return scale   ? DummyContent::kInt4Scales
             : quark ? DummyContent::kInt4Signed
                     : DummyContent::kInt4Codes;
    case WeightCode::kInt8:
      return scale                       ? DummyContent::kInt8Scales
             : slot.dtype == DType::kI32 ? DummyContent::kInt8Offset
                                         : DummyContent::kInt8Codes;
    case WeightCode::kFp8E4M3:
      return scale ? DummyContent::kE4M3Scales : DummyContent::kE4M3Codes;
    case WeightCode::kFp4E2M1:
      return scale ? DummyContent::kE8M0Scales : DummyContent::kE2M1Codes;
    default:
      return DummyContent::kGaussian;
  }
}

/// Whether random tensors of this scheme make up weights: not where codes and zero points belong
/// together, nor where a file beside the weights says how activations are rounded.
bool can_make(const QuantScheme& scheme) {
  return scheme.weight.zero_points == ZeroPoints::kNone && !in_blocks(scheme.act);
}

bool is_int4_in_groups(const QuantConfig& source) {
  const QuantGroup* group = source.groups.size() == 1 ? source.groups.data() : nullptr;
  return source.dialect == Dialect::kCompressedTensors && group != nullptr &&
         group->number == QuantGroup::Number::kInt && group->bits == 4 && group->symmetric &&
         group->strategy == QuantGroup::Strategy::kGroup;
}

bool is_linear(Role role) {
  return role != Role::kEmbedding && role != Role::kHead && role != Role::kRouter &&
         role != Role::kSharedExpertGate;
}

/// Turns the tensors of a model into those that a checkpoint holds.
class StoredLister final {
 public:
  StoredLister(const ModelConfig& model, const DummyStorage& options)
      : model_(model), options_(options) {}

  Result<DummyList> list() {
    NIBBLE_RETURN_IF_ERROR(options_.scheme ? use_scheme() : read_storage());
    for (const ModelTensor& tensor : list_tensors(model_)) {
      NIBBLE_RETURN_IF_ERROR(add(tensor));
    }
    DummyList list{.tensors = std::move(tensors_), .quantization_config = Json()};
    if (!stored_.uses.empty()) {
      name_uses();
      std::ranges::sort(stored_.ignore);  // as names lie in a file
      if (model_.tie_word_embeddings) {
        stored_.ignore.emplace_back("lm_head");  // tied to the embedding, yet a Linear to loaders
      }
      NIBBLE_ASSIGN_OR_RETURN(list.quantization_config, stored_config_json(stored_));
    }
    return list;
  }

 private:
  // What quantize writes has experts one by one.
  [[nodiscard]] bool fuses_experts() const {
    const auto& fused = model_.family->fused;
    return fused.has_value() && fused->published && !rules_;
  }

  static Status check_makes(std::string_view flag, const QuantScheme& scheme) {
    return can_make(scheme)
               ? Status()
               : make_error(StatusCode::kUnsupported,
                            "{} {}: no random weights are made in it; quantize a checkpoint that "
                            "--dtype bf16 makes",
                            flag, scheme.name);
  }

  Status use_scheme() {
    const QuantScheme& scheme = *options_.scheme;
    NIBBLE_RETURN_IF_ERROR(check_makes("--scheme", scheme));
    NIBBLE_ASSIGN_OR_RETURN(rules_, RuleSet::create({.scheme = scheme}, options_.config));
    stored_.dialect = default_dialect(scheme);
    if (options_.others && options_.others->weight.quantized()) {
      NIBBLE_RETURN_IF_ERROR(check_makes("--attention-scheme", *options_.others));
      const Dialect others = default_dialect(*options_.others);
      stored_.dialect = !scheme.weight.quantized()             ? others
                        : options_.others->name == scheme.name ? stored_.dialect
                                                               : Dialect::kCompressedTensors;
    }
    return {};
  }

  // What --attention-scheme is about.
  [[nodiscard]] bool is_other(Role role) const {
    return options_.others && is_linear(role) && !of_a_routed_expert(role);
  }

  /// Notes that a module is stored in a scheme.
  void note_use(const QuantScheme& scheme, const std::string& module) {
    const auto same = [&](const SchemeUse& use) {
      return use.scheme.weight == scheme.weight && use.scheme.act == scheme.act;
    };
    const auto found = std::ranges::find_if(stored_.uses, same);
    SchemeUse& use =
        found != stored_.uses.end() ? *found : stored_.uses.emplace_back(SchemeUse{scheme, {}});
    use.modules.push_back(module);
  }

  /// Modules of several schemes become the patterns that quantize would write; those of one are
  /// every linear layer that is not ignored.
  void name_uses() {
    if (stored_.uses.size() == 1) {
      stored_.uses.front().modules.clear();
      return;
    }
    std::vector<std::vector<std::string>> patterns;
    for (SchemeUse& use : stored_.uses) {
      std::ranges::sort(use.modules);  // as names lie in a file
      std::vector<std::string> others = stored_.ignore;
      for (const SchemeUse& other : stored_.uses) {
        if (&other != &use) {
          others.insert(others.end(), other.modules.begin(), other.modules.end());
        }
      }
      patterns.push_back(module_patterns(use.modules, others));
    }
    for (size_t i = 0; i < patterns.size(); ++i) {
      stored_.uses[i].modules = std::move(patterns[i]);
    }
  }

  Status read_storage() {
    const Json* quant = options_.fields.find("quantization_config");
    if (quant == nullptr || quant->is_null()) {
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(const QuantConfig source, read_quant_config(options_.fields, ""));
    if (source.dialect == Dialect::kFp8) {
      storage_ = Storage::kFp8Blocks;
      return {};
    }
    if (source.dialect == Dialect::kMxfp4 && fuses_experts()) {
      storage_ = Storage::kMxfp4Experts;
      return {};
    }
    if (is_int4_in_groups(source)) {
      storage_ = Storage::kInt4Experts;
      group_size_ = source.groups.front().group_size;
      return {};
    }
    return make_error(StatusCode::kUnsupported,
                      "{}: this form is not made here; give a type with --dtype to leave it out",
                      source.where);
  }

  Status add(const ModelTensor& tensor) {
    switch (tensor.kind) {
      case TensorKind::kNorm:
        tensors_.push_back({tensor.name, options_.dtype, tensor.shape, DummyContent::kOnes});
        return {};
      case TensorKind::kOther: {
        const bool correction = tensor.role == Role::kRouterCorrection;
        tensors_.push_back({tensor.name, correction ? DType::kF32 : options_.dtype, tensor.shape});
        return {};
      }
      case TensorKind::kBias:
        plain(tensor.name, tensor.shape);
        return {};
      case TensorKind::kMatrix:
        break;
    }
    return rules_                                               ? add_by_rule(tensor)
           : of_a_routed_expert(tensor.role) && fuses_experts() ? add_fused(tensor)
                                                                : add_matrix(tensor);
  }

  // As the plan of `nibble quantize` has it.
  Status add_by_rule(const ModelTensor& tensor) {
    NIBBLE_ASSIGN_OR_RETURN(Decision decision, rules_->decide(tensor.module));
    if (is_other(tensor.role)) {
      decision.scheme = options_.others;
    }
    const int64_t n = tensor.shape[0];
    const int64_t k = tensor.shape[1];
    if (!decision.scheme || !decision.scheme->weight.quantized()) {
      if (kind_of(tensor.role) != ModuleKind::kEmbedding) {
        stored_.ignore.push_back(tensor.module);
      }
      plain(tensor.name, tensor.shape);
      return {};
    }
    const QuantScheme& scheme = *decision.scheme;
    if (scheme.weight.scale_per == ScalePer::kGroup && k % scheme.weight.group_size != 0) {
      return make_error(StatusCode::kUnsupported,
                        "{}: {} input channels are no multiple of the group size {}", tensor.module,
                        k, scheme.weight.group_size);
    }
    note_use(scheme, tensor.module);
    for (TensorSlot& slot : linear_slots(scheme, stored_.dialect, n, k)) {
      const DummyContent content = content_of(slot, scheme.weight.code, stored_.dialect);
      tensors_.push_back({fmt::format("{}.{}", tensor.module, slot.suffix), slot.dtype,
                          std::move(slot.shape), content, n, k});
    }
    return {};
  }

  // All experts in one tensor, when the first of them comes: MXFP4 [e, rows, columns / 32, 16],
  // else [e, columns, rows].
  Status add_fused(const ModelTensor& tensor) {
    constexpr std::string_view kExperts = ".experts.";
    const bool down = tensor.role == Role::kExpertDown;
    const std::string name =
        tensor.module.substr(0, tensor.module.find(kExperts) + kExperts.size()) +
        (down ? "down_proj" : "gate_up_proj");
    if (!fused_.insert(name).second) {
      return {};
    }
    const int64_t experts = model_.moe.experts;
    const int64_t rows = tensor.shape[0] * (down ? 1 : 2);
    const int64_t columns = tensor.shape[1];
    if (storage_ != Storage::kMxfp4Experts) {
      plain(name, {experts, columns, rows});
      return {};
    }
    if (columns % kMxGroup != 0) {
      return make_error(StatusCode::kUnsupported, "{}: {} input channels are no multiple of {}",
                        name, columns, kMxGroup);
    }
    const int64_t groups = columns / kMxGroup;
    tensors_.push_back(
        {name + "_blocks", DType::kU8, {experts, rows, groups, 16}, DummyContent::kE2M1Codes});
    tensors_.push_back(
        {name + "_scales", DType::kU8, {experts, rows, groups}, DummyContent::kE8M0Scales});
    return {};
  }

  Status add_matrix(const ModelTensor& tensor) {
    const int64_t n = tensor.shape[0];
    const int64_t k = tensor.shape[1];
    if (storage_ == Storage::kFp8Blocks && is_linear(tensor.role)) {
      tensors_.push_back({tensor.name, DType::kF8E4M3, {n, k}, DummyContent::kE4M3Codes});
      tensors_.push_back({tensor.module + ".weight_scale_inv",
                          DType::kF32,
                          {(n + kFp8Block - 1) / kFp8Block, (k + kFp8Block - 1) / kFp8Block},
                          DummyContent::kE4M3Scales});
      return {};
    }
    if (storage_ != Storage::kInt4Experts || !of_a_routed_expert(tensor.role)) {
      plain(tensor.name, tensor.shape);
      return {};
    }
    if (group_size_ <= 0 || k % group_size_ != 0 || k % 8 != 0) {
      return make_error(StatusCode::kUnsupported,
                        "{}: {} input channels are no multiple of 8 and of the group size {}",
                        tensor.module, k, group_size_);
    }
    tensors_.push_back(
        {tensor.module + ".weight_packed", DType::kI32, {n, k / 8}, DummyContent::kInt4Codes});
    tensors_.push_back({tensor.module + ".weight_scale",
                        options_.dtype,
                        {n, k / group_size_},
                        DummyContent::kInt4Scales});
    tensors_.push_back(
        {tensor.module + ".weight_shape", DType::kI32, {2}, DummyContent::kShape, n, k});
    return {};
  }

  void plain(const std::string& name, std::vector<int64_t> shape) {
    tensors_.push_back({name, options_.dtype, std::move(shape)});
  }

  const ModelConfig& model_;
  const DummyStorage& options_;
  Storage storage_ = Storage::kPlain;
  int64_t group_size_ = 0;
  std::set<std::string> fused_;   // tensors of all experts that are listed
  std::optional<RuleSet> rules_;  // of a scheme
  StoredQuantization stored_;     // by those rules
  std::vector<DummyTensor> tensors_;
};

}  // namespace

Result<QuantScheme> scheme_of_experts(const Json& fields, const std::string& where) {
  const Json* quant = fields.find("quantization_config");
  if (quant != nullptr && !quant->is_null()) {
    NIBBLE_ASSIGN_OR_RETURN(const QuantConfig source, read_quant_config(fields, ""));
    for (const QuantScheme& scheme : all_schemes()) {
      const bool groups = scheme.weight.code == WeightCode::kInt4 && can_make(scheme) &&
                          scheme.weight.scale_per == ScalePer::kGroup &&
                          scheme.act == ActFormat::kFloat;
      if (groups && is_int4_in_groups(source) &&
          source.groups.front().group_size == scheme.weight.group_size) {
        return scheme;
      }
    }
  }
  return make_error(StatusCode::kUnsupported,
                    "{}: quantization_config says of no scheme how experts are stored; give "
                    "--scheme beside --attention-scheme",
                    where);
}

Result<DummyList> list_dummy_tensors(const ModelConfig& model, const DummyStorage& storage) {
  return StoredLister(model, storage).list();
}

}  // namespace nibble
