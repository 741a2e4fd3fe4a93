#include "backend/cuda/self_check.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <random>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/testing/faulty_gemm.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/random_blocks.h"
#include "base/f16.h"
#include "quant/scheme.h"
#include "quant/testing/random_levels.h"

namespace nibble::cuda {
namespace {

QuantTensor random_weight(const WeightFormat& format, int64_t n, int64_t k, uint32_t seed) {
  std::mt19937_64 random(seed);
  QuantTensor weight = QuantTensor::allocate(format, n, k).value();
  // What the bits of 64 are kept, and what is set: numbers of either sign from 0.5 to 2 where the
  // codes are floats, and no NaN in FP8.
  uint64_t keep = ~uint64_t{0}, set = 0;
  switch (format.code) {
    case WeightCode::kBf16:
      keep = 0x80ff80ff80ff80ffU, set = 0x3f003f003f003f00U;
      break;
    case WeightCode::kF16:
      keep = 0x87ff87ff87ff87ffU, set = 0x3800380038003800U;
      break;
    case WeightCode::kF32:
      keep = 0x80ffffff80ffffffU, set = 0x3f0000003f000000U;
      break;
    case WeightCode::kFp8E4M3:
      keep = 0xbfbfbfbfbfbfbfbfU;
      break;
    default:
      break;
  }
  for (uint64_t& word : weight.codes.as<uint64_t>()) {
    word = (random() & keep) | set;
  }
  for (float& scale : weight.scales.as<float>()) {
    scale = bf16_to_f32(f32_to_bf16(0.01F + 0.01F * static_cast<float>(random() % 64)));
  }
  make_levels(weight, random);
  return weight;
}

/// Two matrices, one below the other, as a layer prepares them.
struct Layer {
  Layer(const QuantScheme& scheme, int64_t n, int64_t k)
      : upper(random_weight(scheme.weight, n, k, 1)),
        lower(random_weight(scheme.weight, n / 2, k, 2)),
        parts{view_of(upper), view_of(lower)},
        act(scheme.act == ActFormat::kFloat ? ActSpec(ActFormat::kBf16)
                                            : random_act(scheme, k, 3)) {
    parts[0].name = "file: tensor model.layers.0.mlp.gate_proj.weight";
    parts[1].name = "file: tensor model.layers.0.mlp.up_proj.weight";
  }
  QuantTensor upper, lower;
  std::vector<QuantView> parts;
  ActSpec act;
};

/// The self-test of every kernel for up to max_m rows.
Status check(SelfCheck& test, PreparedGemm& gemm, const Layer& layer, int64_t max_m) {
  return test.check_product(dynamic_cast<CudaGemm&>(gemm), layer.parts, layer.act, max_m);
}

bool has(const Status& status, std::string_view text) {
  return status.message().find(text) != std::string::npos;
}

TEST(SelfCheck, PassesWhatIsRight) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const char* name : {"bf16", "w8a8_int8", "w8a8_fp8", "w8a8_fp8_block", "w4a16_g32",
                           "w4a16_g128", "w4a8", "w4a8_bf16"}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1024, 14336}, {96, 256}}) {
      const Layer layer(find_scheme(name).value(), n, k);
      for (const int64_t max_m : {512, 1, 5}) {
        const auto gemm = backend->prepare_gemm(layer.parts, layer.act, max_m);
        EXPECT_TRUE(gemm.ok()) << name << ": " << gemm.status().message();
      }
    }
  }
}

TEST(SelfCheck, PassesWhatIsRoundedOnTheGpu) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const WeightCode code : {WeightCode::kF16, WeightCode::kF32}) {
    const Layer layer({.name = "", .weight = {.code = code}}, 128, 512);
    const auto gemm = backend->prepare_gemm(layer.parts, layer.act, 64);
    EXPECT_TRUE(gemm.ok()) << gemm.status().message();
  }
}

TEST(SelfCheck, TakesLittleTime) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const char* name : {"bf16", "w8a8_int8", "w8a8_fp8", "w4a16_g128", "w4a8"}) {
    SelfCheck test(nullptr);
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{4096, 4096},
                               {2736, 4096},
                               {38224, 4096},
                               {2736, 14336}}) {  // those of 8B, nearly
      const Layer layer(find_scheme(name).value(), n, k);
      const auto gemm = backend->prepare_gemm(layer.parts, layer.act, 512).value();
      EXPECT_TRUE(check(test, *gemm, layer, 512).ok());
      const int64_t checks = test.checks();
      EXPECT_TRUE(check(test, *gemm, layer, 512).ok());
      EXPECT_EQ(test.checks(), checks) << "done twice";
    }
    std::printf("%-12s %d checks in %.1f ms\n", name, static_cast<int>(test.checks()),
                test.milliseconds());
    EXPECT_LE(test.milliseconds(), 400);
  }
}

TEST(SelfCheck, NamesAKernelThatIsWrong) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const char* name : {"bf16", "w8a8_int8", "w8a8_fp8", "w8a8_fp8_block", "w4a16_g32",
                           "w4a16_g128", "w4a8", "w4a8_bf16"}) {
    Layer layer(find_scheme(name).value(), 512, 1024);
    const auto gemm = backend->prepare_gemm(layer.parts, layer.act, 256).value();
    // The file now says something else about the last row of the second matrix.
    const auto bytes = static_cast<size_t>(layer.lower.row_bytes());
    for (uint8_t& byte : layer.lower.codes.as<uint8_t>().last(bytes)) {
      byte ^= 0x80;
    }
    SelfCheck test(nullptr);
    const Status status = check(test, *gemm, layer, 256);
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << name;
    EXPECT_TRUE(has(status, gemm->kernel_name())) << status.message();
    EXPECT_TRUE(has(status, "up_proj")) << status.message();
    EXPECT_TRUE(has(status, "output 255:")) << status.message();
    std::printf("%s\n", status.message().c_str());
  }
}

// Layers of these schemes are refused by kernels with this fault, in these words.
void expect_refusal(testing::Fault fault,
                    std::initializer_list<const char*> schemes,
                    const char* words) {
  const auto backend = make_cuda_backend({}, testing::faulty_gemms(fault)).value();
  for (const char* name : schemes) {
    const Layer layer(find_scheme(name).value(), 512, 1024);
    const auto gemm = backend->prepare_gemm(layer.parts, layer.act, 64);
    EXPECT_EQ(gemm.status().code(), StatusCode::kUnavailable) << name;
    EXPECT_TRUE(has(gemm.status(), words)) << gemm.status().message();
  }
}

TEST(SelfCheck, RefusesDamagedWeights) {
  NIBBLE_NEEDS_GPU();
  expect_refusal(testing::Fault::kDamagedWeights,
                 {"bf16", "w8a8_int8", "w8a8_fp8", "w4a16_g128", "w4a8"},
                 "self-test: kernel gemm_");
}

TEST(SelfCheck, RefusesAKernelForFewRowsAlone) {
  NIBBLE_NEEDS_GPU();
  expect_refusal(testing::Fault::kWrongFewRows, {"w4a16_g32", "w4a16_g128"}, "with 9 rows");
}

TEST(SelfCheck, ReachesEveryKernel) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const char* name : {"bf16", "w8a8_int8", "w8a8_fp8", "w4a16_g32", "w4a16_g128", "w4a8"}) {
    const Layer layer(find_scheme(name).value(), 2736, 4096);
    const auto gemm = backend->prepare_gemm(layer.parts, layer.act, 4096).value();
    const std::vector<int64_t> counts = dynamic_cast<CudaGemm&>(*gemm).row_counts(1024);
    ASSERT_EQ(counts.front(), 1);
    EXPECT_TRUE(std::ranges::is_sorted(counts));
    std::printf("%-12s", name);
    for (const int64_t m : counts) {
      std::printf(" %d", static_cast<int>(m));
    }
    std::printf(" rows\n");
    if (gemm->kernel_name() == "gemm_w4a16_sm90") {  // one and two, up to 8, up to 16, more
      const std::vector<int64_t> few(counts.begin(), counts.begin() + 5);
      EXPECT_EQ(few, (std::vector<int64_t>{1, 2, 3, 9, 17}));
    }
  }
}

TEST(SelfCheck, PassesTheSampler) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t vocab : {1, 3, 1000, 32001, 128256}) {
    SelfCheck test(nullptr);
    const Status right = test.check_sampling(vocab);
    EXPECT_TRUE(right.ok()) << right.message();
    EXPECT_EQ(test.checks(), 1);
    std::printf("vocabulary %d: %.1f ms\n", static_cast<int>(vocab), test.milliseconds());
  }
}

TEST(SelfCheck, ChecksAttentionOverEveryCache) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const KvCode code :
         {KvCode::kBf16, KvCode::kFp8, KvCode::kInt8, KvCode::kInt4, KvCode::kInt4Static}) {
      for (const int32_t window : {0, 50}) {
        AttentionShape shape{
            .kv = {.code = code, .kv_heads = 8, .head_dim = head_dim},
            .heads = 32,
            .sliding_window = window,
            .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)))};
        SelfCheck test(nullptr);
        const Status right = test.check_attention(shape);
        EXPECT_TRUE(right.ok()) << right.message();
        EXPECT_EQ(test.checks(), 1);
        std::printf("head %d kv %d: %.1f ms\n", head_dim, static_cast<int>(code),
                    test.milliseconds());
        shape.scale *= 3;
        const Status wrong = SelfCheck(nullptr).check_attention(shape);
        EXPECT_EQ(wrong.code(), StatusCode::kUnavailable);
        EXPECT_TRUE(has(wrong, "attention of 32 heads")) << wrong.message();
        std::printf("%s\n", wrong.message().c_str());
      }
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
