#pragma once

#include <utility>

#include "bench/ceilings/ceilings.h"
#include "bench/moe/run_clock.h"

namespace nibble {

/// Times each run by itself, between two measurements of the bandwidth.
class CpuClock final : public RunClock {
 public:
  CpuClock(cpu::NearCeilings ceilings, int64_t repeats)
      : ceilings_(std::move(ceilings)), repeats_(repeats) {}

  [[nodiscard]] int64_t cold_bytes() const override { return int64_t{400} << 20; }
  Result<RunTimings> time(const LayerRuns& runs) override;

 private:
  cpu::NearCeilings ceilings_;
  int64_t repeats_;
};

}  // namespace nibble
