#include <utility>

#include "checkpoint/dialects/compressed_tensors.h"
#include "checkpoint/dialects/config_writers.h"
#include "checkpoint/linear_slots.h"

namespace nibble::compressed_tensors {
namespace {

constexpr int64_t kFp8GroupSize = 128;

const char* format_name(const QuantScheme& scheme) {
  switch (scheme.weight.code) {
    case WeightCode::kInt4:
      return "pack-quantized";
    case WeightCode::kFp4E2M1:
      return "mxfp4-pack-quantized";
    case WeightCode::kFp8E4M3:
      return "float-quantized";
    default:
      return stores_int8_in_words(scheme) ? "pack-quantized" : "int-quantized";
  }
}

const char* strategy(const WeightFormat& weight) {
  switch (weight.scale_per) {
    case ScalePer::kGroup:
      return "group";
    case ScalePer::kTensor:
      return "tensor";
    case ScalePer::kBlock:
      return "block";
    case ScalePer::kNone:
    case ScalePer::kChannel:
      break;
  }
  return "channel";
}

Json weights_json(const WeightFormat& weight) {
  const bool four = weight.code == WeightCode::kInt4 || weight.code == WeightCode::kFp4E2M1;
  const bool real = weight.code == WeightCode::kFp8E4M3 || weight.code == WeightCode::kFp4E2M1;
  const bool grouped = weight.scale_per == ScalePer::kGroup;
  const bool symmetric = weight.zero_points == ZeroPoints::kNone;
  Json json = Json::object({{"num_bits", four ? 4 : 8},
                            {"type", real ? "float" : "int"},
                            {"symmetric", symmetric},
                            {"strategy", strategy(weight)},
                            {"group_size", grouped ? Json(weight.group_size) : Json()},
                            {"dynamic", false},
                            {"actorder", nullptr}});
  if (weight.scale_per == ScalePer::kBlock) {
    json.set("block_structure", JsonArray{weight.group_size, weight.group_size});
  }
  if (!symmetric) {
    json.set("zp_dtype", "torch.int8");
  }
  if (weight.scale_dtype == DType::kF8E8M0) {
    json.set("scale_dtype", "torch.uint8");
  }
  return json;
}

Json activation_json(ActFormat act) {
  if (act == ActFormat::kFloat || act == ActFormat::kBf16) {
    return nullptr;
  }
  const bool grouped = act == ActFormat::kFp8Group;
  return Json::object({{"num_bits", 8},
                       {"type", act == ActFormat::kInt8Token ? "int" : "float"},
                       {"symmetric", true},
                       {"strategy", grouped ? "group" : "token"},
                       {"group_size", grouped ? Json(kFp8GroupSize) : Json()},
                       {"dynamic", true},
                       {"actorder", nullptr}});
}

Json kv_cache_json(KvCacheScheme scheme) {
  if (scheme == KvCacheScheme::kNone) {
    return nullptr;
  }
  return Json::object({{"num_bits", 8},
                       {"type", "float"},
                       {"symmetric", true},
                       {"strategy", "tensor"},
                       {"dynamic", false}});
}

JsonArray targets_of(const SchemeUse& use) {
  if (use.modules.empty()) {
    return {"Linear"};
  }
  return {use.modules.begin(), use.modules.end()};
}

}  // namespace

Json config_json(const StoredQuantization& stored) {
  std::string_view format = format_name(stored.uses.front().scheme);
  std::vector<JsonObject::Member> groups;
  for (const SchemeUse& use : stored.uses) {
    const char* own = format_name(use.scheme);
    format = format == own ? format : "mixed-precision";
    groups.push_back({fmt::format("group_{}", groups.size()),
                      Json::object({{"targets", targets_of(use)},
                                    {"weights", weights_json(use.scheme.weight)},
                                    {"input_activations", activation_json(use.scheme.act)},
                                    {"output_activations", nullptr},
                                    {"format", own}})});
  }
  return Json::object({{"quant_method", kMethod},
                       {"format", format},
                       {"quantization_status", "compressed"},
                       {"kv_cache_scheme", kv_cache_json(stored.kv_cache)},
                       {"config_groups", Json::object(std::move(groups))},
                       {"ignore", JsonArray(stored.ignore.begin(), stored.ignore.end())}});
}

}  // namespace nibble::compressed_tensors
