#pragma once

#include <cstdint>
#include <functional>
#include <set>

#include "arch/family.h"
#include "base/status.h"
#include "calibration/layer_runner.h"
#include "calibration/place_sums.h"
#include "calibration/window_states.h"

namespace nibble {

/// How much each expert of a layer is known of.
struct ExpertSite {
  Role role = Role::kExpertGate;
  int64_t expert = 0;
  const PlaceSums& sums;  // finished, of the rows routed to it, shrunk to the layer's
};

struct ExpertJudging {
  LayerRunner& runner;   // which has the layer
  WindowStates& states;  // behind attention
  ThreadPool& pool;
  const std::set<ActFormat>& rounded;  // formats of rows
  int64_t memory = 0;                  // bytes for the sums of several experts at a time
  std::function<Status(const ExpertSite& site)> judge;
};

/// Shows `judge` every matrix of the routed experts of a layer with the sums of the rows that it
/// multiplies: those that are routed to the expert, shrunk to those of all of the layer's experts,
/// which count as a quarter as many rows as there are columns, as when experts are rounded. Where
/// the sums of all find no room, several passes over the windows collect those of a few; the result
/// is the same.
Status judge_experts(const ExpertJudging& judging);

}  // namespace nibble
