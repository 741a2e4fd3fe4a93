// Numbers far outside of the ranges of a model's int4_static cache: the GPU warns of them as the
// CPU does, in recorded steps, too.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <regex>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_info.h"
#include "checkpoint/kv_sidecar.h"
#include "model/model.h"
#include "model/testing/sequence_runner.h"
#include "storyteller_in.h"
#include "tested_families.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

class CudaStaticRanges : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = cuda::query_device(0);
    if (!device.ok()) {
      GTEST_SKIP() << device.status().message();
    }
    folder_ = fs::path(::testing::TempDir()) / fmt::format("nibble_static_ranges_{}", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    for (const auto& file : fs::directory_iterator(kStoryteller)) {
      fs::create_symlink(fs::absolute(file.path()), folder_ / file.path().filename());
    }
    write_ranges();
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Ranges wide enough for anything, but for one channel of the values of one layer.
  void write_ranges() const {
    const KvSidecarShape shape = kv_sidecar_shape(load_model_config(folder_.string()).value());
    const auto channels = static_cast<size_t>(shape.kv_heads * shape.head_dim);
    const KvSidecar::Half half{.ranges =
                                   KvSidecar::Ranges{.step = std::vector<float>(channels, 1e3F)}};
    KvSidecar sidecar;
    sidecar.layers.assign(static_cast<size_t>(shape.layers), {half, half});
    sidecar.layers[2].values.ranges->step[5] = 1e-9F;
    ASSERT_TRUE(write_kv_sidecar(sidecar, shape, kv_sidecar_path(folder_.string())).ok());
  }

  /// The numbers that warnings name, of `backend`, while steps of a sequence are computed: 6 rows
  /// of a prompt, 5 that are proposed, which a recorded step has more rows for, and 89 of one row.
  [[nodiscard]] std::vector<int64_t> warned_of(std::unique_ptr<Backend> backend) const {
    std::vector<int32_t> tokens(100);
    std::iota(tokens.begin(), tokens.end(), 3);
    const std::span<const int32_t> all(tokens);
    ::testing::internal::CaptureStderr();
    {
      const auto model = load_model(
          folder_.string(), *backend,
          {.max_batch_tokens = 128, .max_logit_rows = 128, .kv_code = KvCode::kInt4Static});
      CHECK_MSG(model.ok(), "{}", model.status().message());
      SequenceRunner runner(**model, *backend, KvCode::kInt4Static);
      runner.feed(all.first(6));
      runner.feed_rows(all.subspan(6, 5));
      runner.feed_in_chunks(all.subspan(11), 1);
    }
    backend.reset();
    const std::string log = ::testing::internal::GetCapturedStderr();
    static const std::regex kWarning("([0-9]+) keys and values so far lay far outside");
    std::vector<int64_t> numbers;
    for (std::sregex_iterator i(log.begin(), log.end(), kWarning), end; i != end; ++i) {
      numbers.push_back(std::stoll((*i)[1]));
    }
    return numbers;
  }

  fs::path folder_;
};

TEST_F(CudaStaticRanges, AreLeftAsOftenAsOnCpus) {
  EXPECT_THAT(warned_of(make_cpu_backend({}).value()), ElementsAre(6, 11, 100));
  EXPECT_THAT(warned_of(make_cuda_backend({}, tested_families()).value()), ElementsAre(6, 11, 100));
}

}  // namespace
}  // namespace nibble
