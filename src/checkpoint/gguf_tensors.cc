#include "checkpoint/gguf_tensors.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

/// Gate's and up's numbers of a layer's experts on their way to one tensor.
struct GateAndUp {
  std::optional<TensorInfo> gate;
  std::optional<TensorInfo> up;
};

/// [experts, width] each, which become [experts, 2 width] with their numbers in turns.
Status append_in_turns(const GateAndUp& parts, std::string_view where, SafetensorsContent& out) {
  if (!parts.gate || !parts.up) {
    const TensorInfo& one = parts.gate ? *parts.gate : *parts.up;
    return make_error(StatusCode::kNotFound,
                      "{}: {}: the file has the part of {} alone; the other must be in the same "
                      "file",
                      where, one.name, parts.gate ? "gate" : "up");
  }
  const TensorInfo& gate = *parts.gate;
  const TensorInfo& up = *parts.up;
  if (gate.blocks != nullptr || up.blocks != nullptr || gate.dtype != up.dtype ||
      gate.shape != up.shape || gate.shape.size() != 2) {
    return make_error(StatusCode::kCorrupt,
                      "{}: {}: expected two tensors of numbers [experts, width], got {} {} and "
                      "{} {}",
                      where, gate.name, gate.type_name(), shape_text(gate.shape), up.type_name(),
                      shape_text(up.shape));
  }
  const size_t size = gate.data.size() / static_cast<size_t>(std::max<int64_t>(gate.elements(), 1));
  std::vector<std::byte>& bytes = out.joined.emplace_back();
  bytes.reserve(2 * gate.data.size());
  for (size_t at = 0; at < gate.data.size(); at += size) {
    for (const TensorInfo* part : {&gate, &up}) {
      const auto number = part->data.subspan(at, size);
      bytes.insert(bytes.end(), number.begin(), number.end());
    }
  }
  TensorInfo both = gate;
  both.shape.back() *= 2;
  both.data = bytes;
  out.tensors.push_back(std::move(both));
  return {};
}

}  // namespace

Result<SafetensorsContent> list_gguf_tensors(const gguf::Metadata& metadata,
                                             const gguf::Content& content) {
  SafetensorsContent out;
  out.tensors.reserve(content.tensors().size());
  std::map<std::string, GateAndUp> in_turns;
  NIBBLE_ASSIGN_OR_RETURN(const Family* family, gguf_family(metadata));
  for (const gguf::Tensor& tensor : content.tensors()) {
    NIBBLE_ASSIGN_OR_RETURN(auto known, gguf_tensor(*family, metadata, tensor.name));
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
    if (known->gate_up != GateUpPart::kNone) {
      GateAndUp& both = in_turns[info.name];
      (known->gate_up == GateUpPart::kGate ? both.gate : both.up) = std::move(info);
      continue;
    }
    out.tensors.push_back(std::move(info));
  }
  for (const auto& [name, both] : in_turns) {
    NIBBLE_RETURN_IF_ERROR(append_in_turns(both, metadata.where(), out));
  }
  return out;
}

}  // namespace nibble
