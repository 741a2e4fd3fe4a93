#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/status.h"

namespace nibble {

/// Runs of a layer that are to be timed.
struct LayerRuns {
  std::function<void(int64_t copy, int64_t rows)> issue;  // a run of one copy of the layer
  int64_t copies = 0;                                     // to be taken in turns
  int64_t rows = 0;
  bool recordable = true;  // PreparedExperts::recordable()
};

/// What runs took.
struct RunTimings {
  std::vector<double> us;          // of one run
  std::vector<double> read_gbps;   // bandwidth of memory beside each of them
  std::optional<double> launches;  // of kernels in a run, where the device has any
};

/// Times runs on one device.
class RunClock {
 public:
  virtual ~RunClock() = default;
  /// Bytes to read before memory that was read comes from no cache any more.
  [[nodiscard]] virtual int64_t cold_bytes() const = 0;
  virtual Result<RunTimings> time(const LayerRuns& runs) = 0;
};

}  // namespace nibble
