#include "checkpoint/gguf_tensors.h"

#include <optional>
#include <string>
#include <utility>

#include <fmt/core.h>

#include "arch/gguf.h"

namespace nibble {
namespace {

std::optional<DType> plain_type(gguf::Type type) {
  using enum gguf::Type;
  switch (type) {
    case kF32:
      return DType::kF32;
    case kF16:
      return DType::kF16;
    case kBF16:
      return DType::kBF16;
    case kF64:
      return DType::kF64;
    case kI8:
      return DType::kI8;
    case kI16:
      return DType::kI16;
    case kI32:
      return DType::kI32;
    case kI64:
      return DType::kI64;
    default:
      return std::nullopt;
  }
}

/// The matrices of all experts, which follow each other in the tensor.
Status append_experts(const TensorInfo& all,
                      const GgufTensor& known,
                      std::string_view where,
                      std::vector<TensorInfo>& out) {
  const int64_t experts = all.shape.size() == 3 ? all.shape[0] : 0;
  if (experts < 1 || all.data.size() % static_cast<size_t>(experts) != 0) {
    return make_error(StatusCode::kCorrupt, "{}: expected [experts, rows, columns], got {}", where,
                      shape_text(all.shape));
  }
  const size_t bytes = all.data.size() / static_cast<size_t>(experts);
  for (int64_t expert = 0; expert < experts; ++expert) {
    TensorInfo one = all;
    one.name = known.of_expert(expert);
    one.shape.erase(one.shape.begin());
    one.data = all.data.subspan(static_cast<size_t>(expert) * bytes, bytes);
    out.push_back(std::move(one));
  }
  return {};
}

}  // namespace

Result<SafetensorsContent> list_gguf_tensors(const gguf::Metadata& metadata,
                                             const gguf::Content& content) {
  SafetensorsContent out;
  out.tensors.reserve(content.tensors().size());
  for (const gguf::Tensor& tensor : content.tensors()) {
    NIBBLE_ASSIGN_OR_RETURN(auto known, gguf_tensor(metadata, tensor.name));
    if (!known.has_value()) {
      continue;
    }
    TensorInfo info{.name = known->name,
                    .paired_heads = known->paired_heads,
                    .shape = tensor.shape,
                    .data = tensor.data};
    if (const auto plain = plain_type(tensor.type)) {
      info.dtype = *plain;
    } else {
      info.blocks = &gguf::type_traits(tensor.type);
    }
    if (known->is_row && info.shape.size() == 1) {
      info.shape.insert(info.shape.begin(), 1);
    }
    if (known->of_expert) {
      const std::string where = fmt::format("{}: tensor {}", metadata.where(), tensor.name);
      NIBBLE_RETURN_IF_ERROR(append_experts(info, *known, where, out.tensors));
      continue;
    }
    out.tensors.push_back(std::move(info));
  }
  return out;
}

}  // namespace nibble
