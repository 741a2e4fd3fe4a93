#include "backend/cpu/registry.h"

#include <algorithm>
#include <regex>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "quant/scheme.h"

namespace nibble::cpu {
namespace {

TEST(CpuRegistry, RefusalsNameTheSchemesOfTheTableThatRun) {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  const WeightFormat fp4{WeightCode::kFp4E2M1, ScalePer::kGroup, 32, DType::kF8E8M0};
  const std::string refusal(backend->check_gemm(fp4, ActFormat::kInt8Token, 256).message());
  for (const QuantScheme& scheme : all_schemes()) {
    const bool runs = backend->check_gemm(scheme.weight, scheme.act, 256).ok();
    const std::string word = "[ ,]" + std::string(scheme.name) + "(,|$)";
    EXPECT_EQ(std::regex_search(refusal, std::regex(word)), runs) << scheme.name << refusal;
  }
}

TEST(CpuRegistry, NamesAreUnique) {
  std::set<std::string_view> names;
  for (const GemmEntry& entry : gemm_entries()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
  }
}

// The kernel that each form takes, spelled out: the order of the registry and what its entries
// accept together.
TEST(CpuRegistry, EveryFormTakesTheKernelMadeForIt) {
  using enum WeightCode;
  struct Case {
    WeightFormat format;
    ActFormat act;
    std::string_view kernel;
    std::string_view exact;  // with exact activations, where that differs
  };
  const auto zeros = [](WeightCode code, int group) {
    return WeightFormat{code, ScalePer::kGroup, group, DType::kF32, ZeroPoints::kPerScale};
  };
  const auto minimums = [](int group) {
    return WeightFormat{kInt4, ScalePer::kGroup, group, DType::kF16, ZeroPoints::kMinimum};
  };
  const Case cases[] = {
      {{kF32}, ActFormat::kFloat, "gemm_f32", ""},
      {{kF16}, ActFormat::kBf16, "gemm_f16", ""},
      {{kBf16}, ActFormat::kBf16, "gemm_bf16", ""},
      {{kInt8, ScalePer::kChannel}, ActFormat::kInt8Token, "gemm_w8a8_int8", ""},
      {{kInt8, ScalePer::kChannel}, ActFormat::kBf16, "gemm_w8a16_int8", ""},
      {{kInt8, ScalePer::kGroup, 16}, ActFormat::kFloat, "gemm_w8a16_int8", ""},
      {{kFp8E4M3, ScalePer::kChannel}, ActFormat::kFp8Token, "gemm_w8a8_fp8", ""},
      {{kFp8E4M3, ScalePer::kChannel}, ActFormat::kFloat, "gemm_w8a16_fp8", ""},
      {{kInt4, ScalePer::kChannel}, ActFormat::kInt8Token, "gemm_w4a8", ""},
      {{kInt4, ScalePer::kChannel}, ActFormat::kBf16, "gemm_w4a16", ""},
      {{kInt4, ScalePer::kGroup, 64}, ActFormat::kFloat, "gemm_w4a16", ""},
      {{kInt4, ScalePer::kGroup, 64}, ActFormat::kBf16, "gemm_w4a16_fixed", "gemm_w4a16"},
      {{kInt4, ScalePer::kGroup, 96}, ActFormat::kBf16, "gemm_w4a16", ""},
      {{kInt4, ScalePer::kGroup, 192}, ActFormat::kBf16, "gemm_w4a16", ""},  // one for the row
      {zeros(kInt4, 64), ActFormat::kBf16, "gemm_w4a16_zeros_fixed", "gemm_w4a16_zeros"},
      {zeros(kInt4, 32), ActFormat::kFloat, "gemm_w4a16_zeros", ""},
      {zeros(kInt8, 32), ActFormat::kBf16, "gemm_w8a16_zeros", ""},
      {zeros(kInt4, 64), ActFormat::kInt8Token, "gemm_w4a8_levels", ""},
      {minimums(32), ActFormat::kBf16, "gemm_w4a16_minimums_fixed", "gemm_w4a16_minimums"},
      {minimums(192), ActFormat::kBf16, "gemm_w4a16_minimums", ""},  // one for the row
      {minimums(32), ActFormat::kFloat, "gemm_w4a16_minimums", ""},
      {{kFp4E2M1, ScalePer::kGroup, 16}, ActFormat::kBf16, "gemm_fp4", ""},
      {{kFp4E2M1, ScalePer::kGroup, 32}, ActFormat::kFp8Token, "gemm_fp4_fp8", ""},
      {{kFp8E4M3, ScalePer::kBlock, 128}, ActFormat::kFp8Group, "gemm_w8a8_fp8_group", ""},
  };
  for (const bool exact : {false, true}) {
    const auto backend =
        make_cpu_backend({.threads = 1, .isa = "scalar", .exact_activations = exact}).value();
    for (const Case& c : cases) {
      QuantTensor weight = QuantTensor::allocate(c.format, 3, 192).value();
      std::ranges::fill(weight.codes.as<uint8_t>(), uint8_t{0});
      std::ranges::fill(weight.scales.as<float>(), 1.0F);
      std::ranges::fill(weight.zeros.as<int8_t>(), int8_t{1});
      std::ranges::fill(weight.minimums.as<float>(), 1.0F);
      const auto gemm = backend->prepare_gemm(weight, c.act, 1).value();
      const auto expected = exact && !c.exact.empty() ? c.exact : c.kernel;
      EXPECT_EQ(gemm->kernel_name(), std::string(expected) + "_scalar");
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
