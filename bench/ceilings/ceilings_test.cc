#include "bench/ceilings/ceilings.h"

#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "backend/cpu/isa.h"
#include "bench/ceilings/ceiling_loops.h"
#include "core/buffer.h"

namespace nibble {
namespace {

TEST(Ceilings, ReadLoopReadsEveryByte) {
  if (!cpu::detect_cpu_features().avx512) {
    GTEST_SKIP() << "this machine has no AVX-512";
  }
  Buffer memory = Buffer::allocate(8 * cpu::kReadStep).value();
  const auto words = memory.as<uint64_t>();
  std::mt19937_64 random(1);
  uint64_t sum = 0;
  for (uint64_t& word : words) {
    word = random();
    sum += word;
  }
  EXPECT_EQ(cpu::read_loop_avx512(memory.data(), 8 * cpu::kReadStep), sum);
}

TEST(Ceilings, AreMeasuredWhereTheMachineHasTheInstructions) {
  const cpu::CpuFeatures features = cpu::detect_cpu_features();
  ThreadPool pool(1);
  const cpu::Ceilings ceilings = cpu::measure_ceilings(pool).value();
  EXPECT_GT(ceilings.read_gbps, 0.5);
  EXPECT_EQ(ceilings.amx_int8_tops.has_value(), features.amx);
  EXPECT_EQ(ceilings.amx_bf16_tops.has_value(), features.amx);
  EXPECT_EQ(ceilings.vnni512_tops.has_value(), features.avx512_vnni);
  EXPECT_EQ(ceilings.vnni256_tops.has_value(), features.avx2_vnni);
  EXPECT_EQ(ceilings.vnni_int8_tops().has_value(), features.avx512_vnni || features.avx2_vnni);
  EXPECT_EQ(ceilings.fma256_tops.has_value(), features.avx2);
  EXPECT_EQ(ceilings.fma512_tops.has_value(), features.avx512);
  if (features.amx) {  // eight times as much on every machine that has both
    EXPECT_GT(*ceilings.amx_int8_tops, *ceilings.vnni512_tops);
    EXPECT_GT(*ceilings.amx_bf16_tops, *ceilings.fma512_tops);
  }
}

TEST(Ceilings, NearOnesAreMeasuredWhereTheMachineHasTheInstructions) {
  const cpu::CpuFeatures features = cpu::detect_cpu_features();
  ThreadPool pool(1);
  cpu::NearCeilings ceilings = cpu::NearCeilings::create(pool).value();
  for (int i = 0; i < 10; ++i) {  // past the end of the memory
    EXPECT_GT(ceilings.read_gbps(), 0.5);
  }
  EXPECT_EQ(ceilings.peak_tops("scalar", ActFormat::kFloat), std::nullopt);
  if (features.avx2) {
    EXPECT_GT(ceilings.peak_tops("avx2", ActFormat::kFloat), 0.001);
  }
  if (features.amx) {
    EXPECT_GT(ceilings.peak_tops("amx", ActFormat::kInt8Token),
              ceilings.peak_tops("avx512", ActFormat::kInt8Token));
    EXPECT_GT(ceilings.peak_tops("amx", ActFormat::kBf16),
              ceilings.peak_tops("avx512", ActFormat::kFp8Token));
  }
}

TEST(Ceilings, EachKernelHasThePeakOfItsInstructions) {
  const cpu::Ceilings ceilings{.read_gbps = 1,
                               .amx_int8_tops = 8,
                               .amx_bf16_tops = 4,
                               .vnni512_tops = 2,
                               .vnni256_tops = 1,
                               .fma512_tops = 0.5,
                               .fma256_tops = 0.25};
  EXPECT_EQ(ceilings.peak_tops("amx", ActFormat::kInt8Token), 8);
  EXPECT_EQ(ceilings.peak_tops("amx", ActFormat::kBf16), 4);
  EXPECT_EQ(ceilings.peak_tops("avx512", ActFormat::kInt8Token), 2);
  EXPECT_EQ(ceilings.peak_tops("avx512", ActFormat::kFp8Token), 0.5);
  EXPECT_EQ(ceilings.peak_tops("avx2_vnni", ActFormat::kInt8Token), 1);
  EXPECT_EQ(ceilings.peak_tops("avx2", ActFormat::kFloat), 0.25);
  EXPECT_EQ(ceilings.peak_tops("scalar", ActFormat::kFloat), std::nullopt);
}

}  // namespace
}  // namespace nibble
