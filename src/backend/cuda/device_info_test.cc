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

std::string text_of(const Status& status, StatusCode code) {
  EXPECT_EQ(status.code(), code);
  EXPECT_NE(status.message().find("--device cpu"), std::string::npos) << status.message();
  return status.message();
}

TEST(DeviceInfo, SaysWhatIsWrongWithTheDriver) {
  const auto no_driver =
      text_of(explain_no_gpu(cudaErrorInsufficientDriver, 0, 13000), StatusCode::kUnavailable);
  EXPECT_NE(no_driver.find("no NVIDIA driver"), std::string::npos) << no_driver;
  EXPECT_NE(no_driver.find("CUDA 13.0"), std::string::npos) << no_driver;
  const auto old_driver =
      text_of(explain_no_gpu(cudaErrorInsufficientDriver, 12040, 13000), StatusCode::kUnavailable);
  EXPECT_NE(old_driver.find("CUDA 12.4"), std::string::npos) << old_driver;
  EXPECT_NE(old_driver.find("13.0"), std::string::npos) << old_driver;
  for (const cudaError_t error : {cudaSuccess, cudaErrorNoDevice}) {
    const auto none = text_of(explain_no_gpu(error, 13000, 13000), StatusCode::kUnavailable);
    EXPECT_NE(none.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << none;
  }
  const auto broken =
      text_of(explain_no_gpu(cudaErrorSystemNotReady, 13000, 13000), StatusCode::kUnavailable);
  EXPECT_NE(broken.find("cudaErrorSystemNotReady"), std::string::npos) << broken;
}

TEST(DeviceInfo, RefusesGpusWithoutKernels) {
  const DeviceInfo turing{.name = "T4", .major = 7, .minor = 5};
  EXPECT_NE(text_of(check_capability(turing, cudaSuccess), StatusCode::kUnsupported).find("7.5"),
            std::string::npos);
  const DeviceInfo newer{.name = "B200", .major = 10, .minor = 0};
  EXPECT_NE(
      text_of(check_capability(newer, cudaErrorNoKernelImageForDevice), StatusCode::kUnsupported)
          .find("10.0"),
      std::string::npos);
  const DeviceInfo hopper{.name = "H200", .major = 9, .minor = 0};
  EXPECT_TRUE(check_capability(hopper, cudaSuccess).ok());
  EXPECT_EQ(check_capability(hopper, cudaErrorLaunchFailure).code(), StatusCode::kUnavailable);
}

TEST(DeviceInfo, ThisGpuHasKernels) {
  NIBBLE_NEEDS_GPU();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_TRUE(check_capability(query_device(0).value(), probe_device_code()).ok());
}

}  // namespace
}  // namespace nibble::cuda
