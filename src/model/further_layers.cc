#include "model/further_layers.h"

#include <string>
#include <string_view>
#include <vector>

#include "arch/family.h"

namespace nibble {
namespace {

// Beside a layer like the others: norms of the two states and the matrix that joins them. Tables of
// its own and a head are not in every file.
constexpr std::string_view kJoining[] = {"enorm", "hnorm", "eh_proj"};

/// Modules with weights that a layer of experts and latent attention has.
std::vector<std::string> modules_of(const ModelConfig& config, int64_t layer) {
  std::vector<std::string> modules;
  for (const std::string_view name : kJoining) {
    modules.push_back(layer_prefix(*config.family, layer) + std::string(name));
  }
  const auto add = [&](Role role, int64_t expert = 0) {
    modules.push_back(module_name(*config.family, role, layer, expert));
  };
  add(Role::kAttentionNorm);
  if (config.latent.q_rank > 0) {
    add(Role::kQueryDown);
    add(Role::kQueryDownNorm);
    add(Role::kQueryUp);
  } else {
    add(Role::kQuery);
  }
  for (const Role role : {Role::kLatentDown, Role::kLatentNorm, Role::kLatentUp,
                          Role::kAttentionOutput, Role::kMlpNorm, Role::kRouter}) {
    add(role);
  }
  if (config.moe.shared_width > 0) {
    add(Role::kSharedGate);
    add(Role::kSharedUp);
    add(Role::kSharedDown);
  }
  for (int64_t expert = 0; expert < config.moe.experts; ++expert) {
    add(Role::kExpertGate, expert);
    add(Role::kExpertUp, expert);
    add(Role::kExpertDown, expert);
  }
  return modules;
}

bool is_stored(const CheckpointReader& reader, const std::string& module) {
  return reader.find(module + ".weight") != nullptr ||
         reader.find(module + ".weight_packed") != nullptr ||
         reader.find(module + ".qweight") != nullptr;
}

}  // namespace

Status check_further_layers(const CheckpointReader& reader, const ModelConfig& config) {
  for (int64_t further = 0; further < config.num_further_layers; ++further) {
    const int64_t layer = config.num_layers + further;
    std::string missing;
    int64_t found = 0;
    const std::vector<std::string> modules = modules_of(config, layer);
    for (const std::string& module : modules) {
      const bool stored = is_stored(reader, module);
      found += stored ? 1 : 0;
      missing = stored || !missing.empty() ? missing : module;
    }
    if (found > 0 && !missing.empty()) {
      return make_error(
          StatusCode::kNotFound,
          "{}: layer {}, which predicts further tokens, is there in part: {} of its {} modules, "
          "without {}.weight; download all files, or take the layer out and set config.json: field "
          "num_nextn_predict_layers to {}",
          reader.path(), layer, found, modules.size(), missing, further);
    }
  }
  return {};
}

}  // namespace nibble
