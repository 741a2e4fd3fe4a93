#include "checkpoint/gguf_tensors.h"

#include <optional>
#include <utility>

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
    TensorInfo info{.name = std::move(known->name),
                    .paired_heads = known->paired_heads,
                    .shape = tensor.shape,
                    .data = tensor.data};
    if (const auto plain = plain_type(tensor.type)) {
      info.dtype = *plain;
    } else {
      info.blocks = &gguf::type_traits(tensor.type);
    }
    out.tensors.push_back(std::move(info));
  }
  return out;
}

}  // namespace nibble
