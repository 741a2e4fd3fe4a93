#include "checkpoint/kv_scales.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "checkpoint/source_formats.h"
#include "checkpoint/source_plain.h"

namespace nibble {
namespace {

/// The one of these tensors that is stored, or nullptr.
Result<const TensorInfo*> find_one(const CheckpointReader& reader,
                                   const std::vector<std::string>& names) {
  const TensorInfo* found = nullptr;
  for (const std::string& name : names) {
    const TensorInfo* tensor = reader.find(name);
    if (found != nullptr && tensor != nullptr) {
      return make_error(StatusCode::kCorrupt,
                        "{}: {} says the same once more; remove one of the two tensors",
                        reader.where(*tensor), found->name);
    }
    found = tensor == nullptr ? found : tensor;
  }
  return found;
}

Result<float> read_scale(const CheckpointReader& reader, const TensorInfo& tensor) {
  if (!is_plain(tensor.dtype) || tensor.elements() < 1) {
    return make_error(StatusCode::kCorrupt, "{}: expected one F32, F16 or BF16, got {} {}",
                      reader.where(tensor), dtype_name(tensor.dtype), shape_text(tensor.shape));
  }
  if (tensor.elements() != 1) {
    return make_error(StatusCode::kUnsupported,
                      "{}: shape {}, but an FP8 cache has one scale for all heads of a layer; "
                      "store the largest of them, or remove the scales, which other caches do not "
                      "need",
                      reader.where(tensor), shape_text(tensor.shape));
  }
  float scale = 0;
  decode_plain(tensor.dtype, tensor.data.data(), 1, &scale);
  if (!std::isnormal(scale) || scale < 0) {
    return make_error(StatusCode::kCorrupt,
                      "{}: the scale of an FP8 cache is {}, but must be positive and finite; "
                      "calibrate the checkpoint again, or remove its scales, which other caches do "
                      "not need",
                      reader.where(tensor), scale);
  }
  return scale;
}

}  // namespace

bool is_kv_scale(std::string_view tensor) {
  static constexpr std::array<std::string_view, 5> kSuffixes = {
      ".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale"};
  return std::ranges::any_of(kSuffixes,
                             [&](std::string_view suffix) { return tensor.ends_with(suffix); });
}

Result<StoredKvScales> read_kv_scales(const CheckpointReader& reader,
                                      std::string_view key,
                                      std::string_view value) {
  StoredKvScales stored;
  const std::string layer(split_name(key).module);
  for (const char* name : {".q_scale", ".prob_scale", ".attn.q_scale", ".attn.prob_scale"}) {
    if (const TensorInfo* tensor = reader.find(layer + name)) {
      stored.tensors.push_back(tensor);
    }
  }
  const auto names = [&](std::string_view module, const std::string& scale) {
    const std::string own(module);
    return std::vector<std::string>{layer + scale, layer + ".attn" + scale, own + scale,
                                    own + ".output_scale", layer + ".kv_scale"};
  };
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* k, find_one(reader, names(key, ".k_scale")));
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* v, find_one(reader, names(value, ".v_scale")));
  if (k == nullptr && v == nullptr) {
    return stored;
  }
  if (k == nullptr || v == nullptr) {
    return make_error(StatusCode::kCorrupt,
                      "{}: the scale of the layer's {} is missing, which an FP8 cache needs as "
                      "well; calibrate the checkpoint again, or remove this one",
                      reader.where(k == nullptr ? *v : *k), k == nullptr ? "keys" : "values");
  }
  KvScales scales;
  NIBBLE_ASSIGN_OR_RETURN(scales.k, read_scale(reader, *k));
  NIBBLE_ASSIGN_OR_RETURN(scales.v, read_scale(reader, *v));
  stored.scales = scales;
  stored.tensors.push_back(k);
  stored.tensors.push_back(v);
  return stored;
}

}  // namespace nibble
