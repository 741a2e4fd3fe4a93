#include "calibration/layer_jobs.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "arch/family.h"

namespace nibble {
namespace {

struct SiteRole {
  Site site;
  Role role;
};
constexpr std::array kAttentionRoles = {
    SiteRole{Site::kQkv, Role::kQuery}, SiteRole{Site::kQkv, Role::kKey},
    SiteRole{Site::kQkv, Role::kValue}, SiteRole{Site::kOutput, Role::kAttentionOutput}};
constexpr std::array kDenseRoles = {SiteRole{Site::kUp, Role::kGate},
                                    SiteRole{Site::kUp, Role::kUp},
                                    SiteRole{Site::kDown, Role::kDown}};
constexpr std::array kSharedRoles = {SiteRole{Site::kSharedUp, Role::kSharedGate},
                                     SiteRole{Site::kSharedUp, Role::kSharedUp},
                                     SiteRole{Site::kSharedDown, Role::kSharedDown}};
constexpr std::array kExpertRoles = {SiteRole{Site::kExpertUp, Role::kExpertGate},
                                     SiteRole{Site::kExpertUp, Role::kExpertUp},
                                     SiteRole{Site::kExpertDown, Role::kExpertDown}};

/// The matrices of a layer as the model has them.
std::vector<SiteRole> roles_of(const ModelConfig& config, int64_t layer) {
  std::vector<SiteRole> roles(kAttentionRoles.begin(), kAttentionRoles.end());
  if (has_experts(config, layer)) {
    if (config.moe.shared_width > 0) {
      roles.insert(roles.end(), kSharedRoles.begin(), kSharedRoles.end());
    }
    roles.insert(roles.end(), kExpertRoles.begin(), kExpertRoles.end());
    return roles;
  }
  for (const SiteRole& part : kDenseRoles) {
    if (part.role != Role::kGate || has_gate(config.activation)) {
      roles.push_back(part);
    }
  }
  return roles;
}

}  // namespace

LayerJobs::LayerJobs(const QuantizePlan& plan, const ModelConfig& config) {
  std::map<std::string, size_t, std::less<>> by_name;
  for (size_t job = 0; job < plan.jobs.size(); ++job) {
    if (plan.jobs[job].matrix != nullptr && plan.jobs[job].scheme.weight.quantized()) {
      by_name.emplace(plan.jobs[job].name(), job);
    }
  }
  const auto take = [&](int64_t layer, const SiteRole& part, int64_t expert) {
    const auto found = by_name.find(module_name(*config.family, part.role, layer, expert));
    if (found != by_name.end()) {
      jobs_[{layer, part.site, expert}].push_back(found->second);
      all_.insert(found->second);
    }
  };
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    for (const SiteRole& part : roles_of(config, layer)) {
      const int64_t experts = of_a_routed_expert(part.role) ? config.moe.experts : 1;
      for (int64_t expert = 0; expert < experts; ++expert) {
        take(layer, part, expert);
      }
    }
  }
  take(config.num_layers, {Site::kHead, Role::kHead}, 0);
}

const std::vector<size_t>& LayerJobs::of(int64_t layer, Site site, int64_t expert) const {
  static const std::vector<size_t> none;
  const auto found = jobs_.find({layer, site, expert});
  return found == jobs_.end() ? none : found->second;
}

std::vector<size_t> LayerJobs::readers(const SiteInput& rows) const {
  if (rows.site != Site::kExpertUp) {
    return of(rows.layer, rows.site, rows.expert);
  }
  std::vector<size_t> jobs;
  for (auto at = jobs_.lower_bound({rows.layer, rows.site, 0});
       at != jobs_.end() && std::get<0>(at->first) == rows.layer &&
       std::get<1>(at->first) == rows.site;
       ++at) {
    jobs.insert(jobs.end(), at->second.begin(), at->second.end());
  }
  return jobs;
}

bool LayerJobs::all_done(const ShardStore& store) const {
  return std::all_of(all_.begin(), all_.end(), [&](size_t job) { return store.done(job); });
}

bool LayerJobs::layer_done(int64_t layer, const ShardStore& store) const {
  for (auto at = jobs_.lower_bound({layer, Site{}, 0}); at != jobs_.end(); ++at) {
    if (std::get<0>(at->first) != layer) {
      break;
    }
    for (const size_t job : at->second) {
      if (!store.done(job)) {
        return false;
      }
    }
  }
  return true;
}

int64_t widest_input(const QuantizePlan& plan, const LayerJobs& jobs) {
  int64_t widest = 0;
  for (const size_t job : jobs.all()) {
    widest = std::max(widest, plan.jobs[job].matrix->k());
  }
  return widest;
}

}  // namespace nibble
