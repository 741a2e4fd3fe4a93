#include "model/fmpq_inputs.h"

#include <algorithm>
#include <memory>

#include "base/file.h"
#include "base/log.h"
#include "checkpoint/fmpq_sidecar.h"

namespace nibble {
namespace {

/// Whether the config.json beside the weights announces a sidecar.
Result<bool> announced_beside(const CheckpointReader& weights) {
  const std::string path = weights.path() + "/config.json";
  if (!file_exists(path)) {
    return false;
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const auto config = Json::parse(text);
  return config.ok() ? announces_fmpq(*config)
                     : Result<bool>(config.status().with_context("config.json"));
}

void warn_of_unannounced(const CheckpointReader& weights) {
  if (file_exists(fmt::format("{}/{}", weights.path(), kFmpqSidecarName))) {
    NIBBLE_LOG(kWarning,
               "{}: {} is there, but config.json has no field {}, so that it is not read and "
               "activations stay as they are; take the config.json that was written with it",
               weights.path(), kFmpqSidecarName, kFmpqConfigField);
  }
}

/// Whether both files say the same about the order of columns, which no product could tell.
Status check_permute(const FmpqSidecar& sidecar, const QuantGroup* gathered) {
  if ((sidecar.permute == FmpqPermute::kGather) == (gathered != nullptr)) {
    return {};
  }
  return make_error(
      StatusCode::kCorrupt,
      "{}: field permute: says that inputs are {}, but {} says that they are{}; take "
      "both files from the folder that was written with the weights",
      kFmpqSidecarName, gathered == nullptr ? "gathered" : "not gathered",
      gathered == nullptr ? "config.json: quantization_config" : gathered->activations.where,
      gathered == nullptr ? " not" : "");
}

ActSpec spec_of(const FmpqSidecar& sidecar, const FmpqSidecar::Site& site, FmpqUse use) {
  ActSpec spec;
  if (!site.columns.empty()) {
    spec.columns = std::make_shared<const std::vector<int32_t>>(site.columns);
  }
  if (use == FmpqUse::kApplied) {
    spec.format = sidecar.act();
    spec.blocks = std::make_shared<const BlockPrecision>(site.precision);
  }
  return spec;
}

}  // namespace

Result<FmpqInputs> FmpqInputs::open(const CheckpointReader& weights,
                                    const QuantConfig& config,
                                    FmpqUse use) {
  const auto gathered = std::ranges::find_if(
      config.groups, [](const QuantGroup& group) { return group.activations.gathered; });
  NIBBLE_ASSIGN_OR_RETURN(const bool announced, announced_beside(weights));
  FmpqInputs inputs;
  if (!announced && gathered != config.groups.end()) {
    return make_error(StatusCode::kCorrupt,
                      "config.json: field {} is missing, but {} says that inputs are gathered as "
                      "the file {} tells; take the config.json that was written with the weights",
                      kFmpqConfigField, gathered->activations.where, kFmpqSidecarName);
  }
  if (!announced) {
    warn_of_unannounced(weights);
    return inputs;
  }
  if (use == FmpqUse::kIgnored && gathered == config.groups.end()) {
    NIBBLE_LOG(kInfo, "{}: {} is ignored: activations stay as they are", weights.path(),
               kFmpqSidecarName);
    return inputs;
  }
  NIBBLE_ASSIGN_OR_RETURN(const FmpqSidecar sidecar, read_fmpq_sidecar(weights.path(), weights));
  NIBBLE_RETURN_IF_ERROR(
      check_permute(sidecar, gathered == config.groups.end() ? nullptr : &*gathered));
  NIBBLE_LOG(kInfo, "{}: {}: {}{}", weights.path(), kFmpqSidecarName, describe(sidecar, weights),
             use == FmpqUse::kIgnored ? "; ignored, but for the order of inputs" : "");
  for (const FmpqSidecar::Site& site : sidecar.sites) {
    const ActSpec spec = spec_of(sidecar, site, use);
    for (const std::string& module : site.modules) {
      inputs.inputs_.emplace(module, spec);
    }
  }
  return inputs;
}

Status FmpqInputs::apply(const std::string& module, MappedLinear& weights) const {
  const auto found = inputs_.find(module);
  if (found == inputs_.end()) {
    return {};
  }
  const ActSpec& spec = found->second;
  const auto bad = [&](const std::string& what) {
    return make_error(StatusCode::kCorrupt,
                      "{}: {}: {}; calibrate the model again (nibble quantize --scheme NAME "
                      "--calibrate TEXT), or run it with --ignore-fmpq",
                      kFmpqSidecarName, module, what);
  };
  if (weights.act.format != ActFormat::kFloat || weights.act.columns != nullptr ||
      weights.weight.format.code != WeightCode::kInt4) {
    return bad("its weights are not plain INT4 with activations as they are");
  }
  const int64_t k = weights.weight.k;
  if (spec.blocks != nullptr) {
    const Status fits = check_blocks(*spec.blocks, spec.format, weights.weight.format, k);
    if (!fits.ok()) {
      return bad(std::string(fits.message()));
    }
  }
  if (spec.columns != nullptr && std::ssize(*spec.columns) != k) {
    return bad(fmt::format("field columns: has {} entries for {} inputs", spec.columns->size(), k));
  }
  weights.act = spec;
  return {};
}

}  // namespace nibble
