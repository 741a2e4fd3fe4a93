#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "quant/scheme.h"

namespace nibble {

/// What a device's own benchmark of its matrix products times.
struct KernelBenchOptions {
  struct Shape {
    int64_t n = 0;
    int64_t k = 0;
  };
  std::vector<QuantScheme> schemes;  // none: all that the device runs
  std::vector<std::string> kernels;  // none: all that the device would take
  std::vector<Shape> shapes;         // none: those of the published tables
  std::vector<int64_t> row_counts;   // none: likewise
  double rest = 3.0;                 // idle time after each timed run, in its own lengths
  double a4_share = 0.75;  // of schemes with activations in blocks: those of the fewer bits
  std::function<void(const std::string& line)> progress;  // a line of a table at a time; or empty
};

}  // namespace nibble
