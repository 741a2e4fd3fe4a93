#include "checkpoint/source_matrix.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "checkpoint/announced.h"
#include "checkpoint/gguf_matrix.h"
#include "checkpoint/source_formats.h"
#include "checkpoint/source_plain.h"

namespace nibble {
namespace {

// Parts of stored matrices: left over, they are scales without codes.
constexpr std::array<std::string_view, 7> kParts = {
    "weight_scale",      "weight_scale_inv", "weight_scale_2", "weight_global_scale",
    "weight_zero_point", "weight_g_idx",     "weight_shape"};
constexpr std::array<std::string_view, 3> kWordParts = {"qzeros", "scales", "g_idx"};

FusedModel fused_model(const Json& config) {
  FusedModel model{.family = guess_family(config)};
  for (const Json* from : {&config, config.find("text_config")}) {
    const Json* size = from == nullptr ? nullptr : from->find("hidden_size");
    if (size != nullptr && size->is_int()) {
      model.hidden_size = size->as_int();
    }
  }
  return model;
}

/// Walks over all tensors in file order.
class Lister final {
 public:
  Lister(const CheckpointReader& reader, const QuantConfig& config, FusedModel model)
      : context_{reader, config}, model_(std::move(model)) {}

  Result<SourceModel> list() {
    for (const TensorInfo* tensor : context_.reader.tensors()) {
      NIBBLE_RETURN_IF_ERROR(visit(*tensor));
    }
    NIBBLE_RETURN_IF_ERROR(check_modules());
    for (const TensorInfo* tensor : context_.reader.tensors()) {
      if (used_.count(tensor) == 0) {
        NIBBLE_RETURN_IF_ERROR(check_orphan(*tensor));
        out_.others.push_back(tensor);
      }
    }
    return std::move(out_);
  }

 private:
  Status visit(const TensorInfo& tensor) {
    const SplitName name = split_name(tensor.name);
    const std::string module(name.module);
    if (name.suffix == "weight_packed" || name.suffix == "qweight") {
      return add(stored_facts(context_, tensor, module));
    }
    if (name.suffix == "weight" && !module.empty()) {
      return visit_weight(tensor, module);
    }
    if (tensor.name.ends_with(kBlocksSuffix)) {
      return add_experts(tensor, append_expert_blocks(context_, tensor, out_.matrices));
    }
    if (is_fused_experts(tensor, model_)) {
      return add_experts(tensor, append_fused_experts(context_, tensor, model_, out_.matrices));
    }
    return check_known(tensor, name);
  }

  // Experts in forms that would otherwise pass as tensors without weights.
  [[nodiscard]] Status check_known(const TensorInfo& tensor, const SplitName& name) const {
    const bool openai = name.suffix == "blocks" && tensor.dtype == DType::kU8;
    const bool coded = name.module.ends_with(".experts") && !is_plain(tensor.dtype) &&
                       (name.suffix == "gate_up_proj" || name.suffix == "down_proj");
    return openai || coded
               ? context_.unsupported(tensor,
                                      "codes of all experts in this form are not read; convert the "
                                      "checkpoint to the names of transformers, experts one by one")
               : Status();
  }

  // A plain matrix, or codes that need scales. Vectors and what has more axes stay as they are.
  Status visit_weight(const TensorInfo& tensor, const std::string& module) {
    if (lies_as_in_gguf(tensor)) {
      NIBBLE_ASSIGN_OR_RETURN(auto source, make_gguf_source(context_.reader, tensor, module));
      out_.matrices.push_back(std::move(source));
      used_.insert(&tensor);
      return {};
    }
    if (is_plain_matrix(tensor)) {
      NIBBLE_RETURN_IF_ERROR(check_plain_alone(context_, tensor, module));
      out_.matrices.push_back(make_plain_source(context_.reader, tensor, module));
      used_.insert(&tensor);
      return {};
    }
    const bool codes = tensor.dtype == DType::kI8 || tensor.dtype == DType::kU8 ||
                       tensor.dtype == DType::kI32 || tensor.dtype == DType::kF8E4M3;
    const bool has_scales = context_.find(module, "weight_scale") != nullptr ||
                            context_.find(module, "weight_scale_inv") != nullptr;
    if (!codes || (tensor.shape.size() != 2 && !has_scales)) {
      return is_small_float(tensor.dtype)
                 ? context_.unsupported(tensor, fmt::format("codes of type {} are not read",
                                                            dtype_name(tensor.dtype)))
                 : Status();
    }
    return add(stored_facts(context_, tensor, module));
  }

  static bool is_small_float(DType dtype) {
    return dtype == DType::kF4E2M1 || dtype == DType::kF6E2M3 || dtype == DType::kF6E3M2 ||
           dtype == DType::kF8E5M2 || dtype == DType::kF8E4M3FNUZ || dtype == DType::kF8E5M2FNUZ;
  }

  // One tensor for all experts and others for each of them would be two weights of one module.
  [[nodiscard]] Status check_modules() const {
    std::unordered_set<std::string_view> modules;
    for (const auto& matrix : out_.matrices) {
      if (!modules.insert(matrix->module()).second) {
        return make_error(StatusCode::kCorrupt, "{}: the weights of {} are stored twice",
                          matrix->where(), matrix->module());
      }
    }
    return {};
  }

  Status add(Result<CodedFacts> facts) {
    if (!facts.ok()) {
      return facts.status();
    }
    out_.matrices.push_back(make_coded_source(context_.reader, std::move(*facts)));
    use(*out_.matrices.back());
    return {};
  }

  Status add_experts(const TensorInfo& tensor, Status status) {
    if (status.ok()) {
      use(*out_.matrices.back());
      used_.insert(&tensor);
    }
    return status;
  }

  void use(const SourceMatrix& matrix) {
    used_.insert(matrix.tensors().begin(), matrix.tensors().end());
  }

  [[nodiscard]] Status check_orphan(const TensorInfo& tensor) const {
    const std::string_view suffix = split_name(tensor.name).suffix;
    const Dialect method = context_.config.dialect;
    const bool words = method == Dialect::kGptq || method == Dialect::kAwq;
    const bool part =
        std::find(kParts.begin(), kParts.end(), suffix) != kParts.end() ||
        (words && std::find(kWordParts.begin(), kWordParts.end(), suffix) != kWordParts.end()) ||
        (method == Dialect::kMxfp4 && suffix.ends_with(kScalesSuffix));
    return part ? context_.corrupt(tensor,
                                   "belongs to no codes; their tensor was cut from the checkpoint, "
                                   "or they are stored in a form that has no such part")
                : Status();
  }

  SourceContext context_;
  FusedModel model_;
  SourceModel out_;
  std::unordered_set<const TensorInfo*> used_;
};

}  // namespace

Status decode_once(const SourceMatrix& matrix,
                   const CheckpointReader& reader,
                   std::pair<int64_t, int64_t> row_and_count,
                   float* out) {
  const auto [row, count] = row_and_count;
  const Status status = matrix.decode(row, count, out);
  for (const std::span<const std::byte> part : matrix.touched(row, count)) {
    reader.drop_pages(part);
  }
  return status;
}

int64_t bytes_of(std::span<const std::span<const std::byte>> parts) {
  int64_t sum = 0;
  for (const auto& part : parts) {
    sum += static_cast<int64_t>(part.size());
  }
  return sum;
}

Result<SourceModel> list_source_matrices(const CheckpointReader& reader, const Json& config) {
  NIBBLE_ASSIGN_OR_RETURN(const QuantConfig source, read_quant_config(config, reader.path()));
  for (const QuantGroup& group : source.groups) {
    if (group.activations.gathered) {
      return make_error(StatusCode::kUnsupported,
                        "{}: inputs are gathered, so that columns of weights lie in another order "
                        "than the model's; quantize the model that this one was made from",
                        group.activations.where);
    }
  }
  auto model = Lister(reader, source, fused_model(config)).list();
  if (model.ok() && !source.groups.empty() && !source.beside) {
    NIBBLE_RETURN_IF_ERROR(check_announced(reader, source.dialect, source.where));
  }
  return model;
}

}  // namespace nibble
