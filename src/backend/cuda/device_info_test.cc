#include "backend/cuda/device_info.h"

#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

TEST(DeviceInfo, ReportsTheGpu) {
  NIBBLE_NEEDS_GPU();
  const DeviceInfo info = query_device(0).value();
  EXPECT_GE(info.major, 8);
  EXPECT_GT(info.sms, 0);
  EXPECT_GT(info.shared_bytes, size_t{48} << 10);
}

TEST(DeviceInfo, RefusesWhatIsNotThere) {
  const auto info = query_device(4096);
  ASSERT_FALSE(info.ok());
  EXPECT_NE(info.status().message().find("GPU"), std::string::npos);
}

}  // namespace
}  // namespace nibble::cuda
