#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace nibble {

/// Which experts the rows of a benchmark take.
enum class Routing : uint8_t {
  kUniform,   // each row any, at random
  kBalanced,  // one row after the other the next ones, so that all get equally many rows
  kZipf,      // at random, the expert of rank r with a weight of 1 / r^1.2; ranks are shuffled
  kOne,       // all rows the same
};

/// kInvalidArgument with the list of names: uniform, balanced, zipf, one.
[[nodiscard]] Result<Routing> find_routing(std::string_view name);
[[nodiscard]] std::string_view routing_name(Routing routing);
/// "uniform, balanced, ...".
[[nodiscard]] std::string routing_names();

struct RoutingRequest {
  Routing routing = Routing::kUniform;
  int64_t experts = 0;
  int64_t top_k = 0;  // at most all experts
  int64_t rows = 0;
  uint64_t seed = 1;
};

/// The experts of each row, best first and all different: [rows, top_k]. The first rows of more
/// rows are the same.
[[nodiscard]] std::vector<int32_t> choose_experts(const RoutingRequest& request);

/// How rows are shared out among experts.
struct ExpertLoad {
  int64_t active = 0;  // experts that have a row
  int64_t most = 0;    // rows of the expert that has most
  double mean = 0;     // rows of an active expert
};

[[nodiscard]] ExpertLoad load_of(std::span<const int32_t> chosen, int64_t experts);

}  // namespace nibble
