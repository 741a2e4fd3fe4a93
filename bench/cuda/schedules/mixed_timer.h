#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "bench/cuda/bench_timer.h"
#include "bench/cuda/schedules/mixed_data.h"

namespace nibble::cuda {

/// Times launches in recorded chains over copies of operands that the L2 cache does not hold.
class MixedTimer final {
 public:
  MixedTimer(const DeviceInfo& device, int replays) : device_(device), replays_(replays) {}
  Status start() {
    NIBBLE_ASSIGN_OR_RETURN(timer_, Timer::make());
    return {};
  }

  /// Of operands of so many bytes.
  [[nodiscard]] size_t copies_of(size_t bytes) const {
    return std::max<size_t>(2, 3 * device_.l2_bytes / bytes + 1);
  }
  [[nodiscard]] cudaStream_t stream() const { return timer_->stream(); }
  Status wait() { return timer_->wait(); }

  /// Median microseconds of a launch; launch(copy) runs one.
  template <typename Launch>
  Result<double> time(size_t copies, const Launch& launch) {
    NIBBLE_ASSIGN_OR_RETURN(const Recording recording, timer_->record([&]() -> Status {
      for (size_t copy = 0; copy < copies; ++copy) {
        NIBBLE_RETURN_IF_ERROR(check(launch(copy), "launching"));
      }
      return {};
    }));
    std::vector<double> us;
    for (int replay = 0; replay <= replays_; ++replay) {
      NIBBLE_ASSIGN_OR_RETURN(const double all, timer_->replay(recording));
      us.push_back(all / static_cast<double>(copies));
      // As long as it ran, so that the power limit does not lower the clocks of what follows.
      std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(all));
    }
    us.erase(us.begin());
    return median(us);
  }

  Result<double> time_mixed(const MixedData& data,
                            size_t copies,
                            const MixedTile& tile,
                            MixedSchedule schedule,
                            int unit_blocks) {
    NIBBLE_ASSIGN_OR_RETURN(const auto product, MixedProduct::make(data.problem(), tile, schedule,
                                                                   unit_blocks, device_));
    return time(copies, [&](size_t copy) {
      return product->run(data.operands(order_of(tile.form), copy), {.stream = stream()});
    });
  }

 private:
  const DeviceInfo& device_;
  int replays_;
  std::unique_ptr<Timer> timer_;
};

}  // namespace nibble::cuda
