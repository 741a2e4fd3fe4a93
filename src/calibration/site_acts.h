#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "calibration/layer_jobs.h"
#include "quant/act_spec.h"

namespace nibble {

/// How rows enter the products of a model's sites, where the scheme does not say all of it.
class SiteActs final {
 public:
  void set(int64_t layer, Site site, ActSpec act) { acts_[{layer, site}] = std::move(act); }
  [[nodiscard]] bool empty() const { return acts_.empty(); }
  /// In the order of layers and sites.
  [[nodiscard]] const std::map<std::pair<int64_t, Site>, ActSpec>& all() const { return acts_; }
  /// Null: as the scheme says.
  [[nodiscard]] const ActSpec* find(int64_t layer, Site site) const {
    const auto found = acts_.find({layer, site});
    return found == acts_.end() ? nullptr : &found->second;
  }

 private:
  std::map<std::pair<int64_t, Site>, ActSpec> acts_;
};

}  // namespace nibble
