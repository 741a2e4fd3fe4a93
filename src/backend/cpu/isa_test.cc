#include "backend/cpu/isa.h"

#include <cerrno>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/backend.h"

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr cpu::CpuFeatures kPlain = {};
constexpr cpu::CpuFeatures kHaswell = {.avx2 = true};
constexpr cpu::CpuFeatures kSkylake = {.avx2 = true, .avx512 = true};
constexpr cpu::CpuFeatures kIceLake = {.avx2 = true, .avx512 = true, .avx512_vnni = true};
constexpr cpu::CpuFeatures kAlderLake = {.avx2 = true, .avx2_vnni = true};
constexpr cpu::CpuFeatures kSapphireRapids = {
    .avx2 = true, .avx2_vnni = true, .avx512 = true, .avx512_vnni = true, .amx = true};

TEST(Isa, AutoTakesTheBestOfTheMachine) {
  EXPECT_STREQ(cpu::find_kernels("auto", kPlain).value()->name, "scalar");
  EXPECT_STREQ(cpu::find_kernels("auto", kHaswell).value()->name, "avx2");
  EXPECT_STREQ(cpu::find_kernels("auto", kSkylake).value()->name, "avx512_bw");
  EXPECT_STREQ(cpu::find_kernels("auto", kIceLake).value()->name, "avx512");
  EXPECT_STREQ(cpu::find_kernels("auto", kAlderLake).value()->name, "avx2_vnni");
  EXPECT_STREQ(cpu::find_kernels("auto", kSapphireRapids).value()->name, "amx");
}

TEST(Isa, TilesThatTheSystemRefusesAreNamedAndPassedOver) {
  cpu::CpuFeatures refused = kSapphireRapids;
  refused.amx = false;
  refused.amx_refusal = EPERM;
  EXPECT_STREQ(cpu::find_kernels("auto", refused).value()->name, "avx512");
  EXPECT_THAT(cpu::find_kernels("amx", refused).status().message(),
              HasSubstr("cannot run the amx kernels"));
  testing::internal::CaptureStderr();
  cpu::log_missing(refused, "avx512");
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("refuses this processor's AMX (Operation not permitted)"));
  EXPECT_THAT(log, HasSubstr("avx512"));
}

TEST(Isa, PlainKernelsComeWithAWarning) {
  testing::internal::CaptureStderr();
  cpu::log_missing(kPlain, "scalar");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("no AVX2"));
}

TEST(Isa, ListsWhatTheMachineHas) {
  EXPECT_THAT(cpu::supported_isas(kPlain), ElementsAre("scalar"));
  EXPECT_THAT(cpu::supported_isas(kSkylake), ElementsAre("scalar", "avx2", "avx512_bw"));
}

TEST(Isa, ALesserOneCanBeForced) {
  EXPECT_STREQ(cpu::find_kernels("scalar", kIceLake).value()->name, "scalar");
  EXPECT_STREQ(cpu::find_kernels("avx2", kIceLake).value()->name, "avx2");
}

TEST(Isa, RefusesWhatTheMachineLacks) {
  const Status status = cpu::find_kernels("avx512", kHaswell).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("cannot run the avx512 kernels"));
  EXPECT_THAT(status.message(), HasSubstr("scalar, avx2:"));
  EXPECT_EQ(cpu::find_kernels("avx2", kPlain).status().code(), StatusCode::kUnsupported);
}

TEST(Isa, RefusesUnknownNames) {
  const Status status = make_cpu_backend({.threads = 1, .isa = "mmx"}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("\"mmx\""));
  EXPECT_THAT(status.message(), HasSubstr("scalar"));
  EXPECT_THAT(status.message(), Not(HasSubstr("mmx,")));
}

}  // namespace
}  // namespace nibble
