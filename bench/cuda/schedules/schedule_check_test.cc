#include "bench/cuda/schedules/schedule_check.h"

#include <gtest/gtest.h>

namespace nibble::cuda {
namespace {

TEST(Schedules, AllGiveTheBitsOfOneAndWhatDoublePrecisionGives) {
  const auto device = query_device(0);
  if (!device.ok() || !device->hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  const Status status = check_schedules(*device);
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace nibble::cuda
