#pragma once

#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "base/json.h"
#include "checkpoint/fmpq_sidecar.h"
#include "quant/scheme.h"

namespace nibble {

/// The scheme of the same weights, maybe with scales of another type, whose activations are as they
/// are.
inline QuantScheme weights_alone(const QuantScheme& scheme) {
  for (const QuantScheme& other : all_schemes()) {
    WeightFormat weight = other.weight;
    weight.scale_dtype = scheme.weight.scale_dtype;
    if (weight == scheme.weight && other.act == ActFormat::kFloat) {
      return other;
    }
  }
  ADD_FAILURE() << "no scheme of these weights";
  return scheme;
}

/// Lets the routed experts of a folder in weights_alone(scheme) read rows in random blocks of
/// `block` channels: gate and up of a layer the same, each down its own.
inline void add_random_expert_blocks(const std::string& folder,
                                     const QuantScheme& scheme,
                                     int block) {
  constexpr std::string_view kPacked = ".weight_packed", kDown = ".down_proj";
  const CheckpointReader weights = CheckpointReader::open(folder).value();
  std::map<std::string, FmpqSidecar::Site> sites;  // by what their names begin with
  std::mt19937 random(5);
  for (const TensorInfo* tensor : weights.tensors()) {
    const size_t experts = tensor->name.find(".experts.");
    if (experts == std::string::npos || !tensor->name.ends_with(kPacked)) {
      continue;
    }
    const std::string module = tensor->name.substr(0, tensor->name.size() - kPacked.size());
    FmpqSidecar::Site& site = sites[module.ends_with(kDown) ? module : module.substr(0, experts)];
    site.modules.push_back(module);
    site.precision.block = block;
    site.rows = 0.25;
    const auto blocks = static_cast<size_t>(tensor->shape.back() * 8 / block);
    while (site.precision.bits.size() < blocks) {
      site.precision.bits.push_back(random() % 3 == 0 ? 8 : 4);
    }
  }
  FmpqSidecar sidecar;
  sidecar.scales = block_scales_of(scheme.weight, scheme.act);
  sidecar.block = block;
  sidecar.permute = FmpqPermute::kNone;
  for (auto& [name, site] : sites) {
    sidecar.sites.push_back(std::move(site));
  }
  ASSERT_FALSE(sidecar.sites.empty());
  const Status written = write_fmpq_sidecar(sidecar, weights, folder);
  ASSERT_TRUE(written.ok()) << written.message();
  const std::string path = folder + "/config.json";
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  Json config = Json::parse(text.str()).value();
  config.as_object().set(std::string(kFmpqConfigField), fmpq_config_json(sidecar));
  std::ofstream(path) << config.dump();
}

}  // namespace nibble
