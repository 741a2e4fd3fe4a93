#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "bench/moe/expert_layer.h"
#include "bench/moe/routing.h"
#include "bench/moe/run_clock.h"
#include "bench/quartiles.h"

namespace nibble {

/// A layer of experts in one scheme, at one number of rows.
struct MoeTiming {
  std::string scheme;
  std::string kernel;  // of gate and up
  int64_t m = 0;
  int64_t rows = 0;    // MoeShape::rows_of(m)
  int64_t slots = 0;   // rows of all experts together
  int64_t copies = 0;  // of the layer, that took turns
  ExpertLoad load;
  Quartiles us;              // of one run, from router to combining
  int64_t active_bytes = 0;  // of the active experts and the router, as they are packed
  double gbps = 0;           // of these bytes
  double read_gbps = 0;      // median of the bandwidth beside the runs
  Quartiles read_percent;    // of the bandwidth beside each run
  double tflops = 0;         // of the products of all slots, two operations for each multiply-add
  std::optional<double> launches;
};

struct MoeBenchOptions {
  MoeShape shape;
  Routing routing = Routing::kUniform;
  uint64_t seed = 1;
  std::vector<int64_t> row_counts;                 // each m
  int64_t copies = 0;                              // of the layer; 0: as many as the caches need
  std::vector<std::string> kernels;                // only layers that take one of these; none: all
  std::function<void(const MoeTiming&)> progress;  // called as figures come in; or empty
};

/// The backend's own error for a scheme that it does not run experts of these sizes in, at little
/// cost.
Status check_moe_scheme(Backend& backend, const QuantScheme& scheme, const MoeShape& shape);

/// Times PreparedExperts::run() for each m: rows that are all different, steered to the experts of
/// the routing, through copies of the layer in turns, so that weights come from memory.
/// kInvalidArgument where the layer takes none of the kernels.
Result<std::vector<MoeTiming>> bench_moe(Backend& backend,
                                         RunClock& clock,
                                         const QuantScheme& scheme,
                                         const MoeBenchOptions& options);

}  // namespace nibble
