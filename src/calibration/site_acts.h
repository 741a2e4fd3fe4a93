#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "calibration/layer_jobs.h"
#include "quant/act_spec.h"

namespace nibble {

/// How rows enter products, where the scheme does not say all of it.
struct SiteAct {
  ActSpec spec;
  double rows = 1;  // of a text's rows that enter each of these products, on average
};

/// Of the sites of a model.
class SiteActs final {
 public:
  void set(const SiteInput& rows, SiteAct act) { acts_[rows] = std::move(act); }
  [[nodiscard]] bool empty() const { return acts_.empty(); }
  /// In the order of layers and sites.
  [[nodiscard]] const std::map<SiteInput, SiteAct>& all() const { return acts_; }
  /// Null: as the scheme says. Every expert's gate and up have that of the first.
  [[nodiscard]] const ActSpec* find(SiteInput rows) const {
    rows.expert = rows.site == Site::kExpertUp ? 0 : rows.expert;
    const auto found = acts_.find(rows);
    return found == acts_.end() ? nullptr : &found->second.spec;
  }

 private:
  std::map<SiteInput, SiteAct> acts_;
};

}  // namespace nibble
