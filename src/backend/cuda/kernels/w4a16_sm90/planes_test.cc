#include "backend/cuda/kernels/w4a16_sm90/planes.h"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "backend/cuda/forwarding_gemm.h"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.h"
#include "backend/cuda/testing/gemm_check.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "quant/codec.h"
#include "quant/quant_tensor.h"

namespace nibble::cuda {
namespace {

// Planes lose 2^-22 of the largest of 128 activations at most, sums are in f32.
constexpr double kTolerance = 2e-6;

// The family's layout, and these kernels for every m.
class PlanesOnly final : public ForwardingGemm {
 public:
  PlanesOnly(std::unique_ptr<GemmKernel> family, const W4A16Planes& planes)
      : ForwardingGemm(std::move(family)), planes_(planes) {}
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    return planes_.run(args, context);
  }

 private:
  W4A16Planes planes_;
};

Result<std::unique_ptr<GemmKernel>> make_planes(const GemmProblem& problem,
                                                const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(auto family, kGemmW4A16Sm90.make(problem, device));
  NIBBLE_ASSIGN_OR_RETURN(const W4A16Planes planes, W4A16Planes::make(problem, device));
  return std::unique_ptr<GemmKernel>(std::make_unique<PlanesOnly>(std::move(family), planes));
}

const GemmEntry kPlanes = {"gemm_w4a16_planes_sm90", kGemmW4A16Sm90.accepts, make_planes};

bool hopper() { return query_device(0).value().hopper(); }

// A GPU of two multiprocessors, so that a block has several tiles of a small matrix.
Result<std::unique_ptr<GemmKernel>> make_for_two(const GemmProblem& problem,
                                                 const DeviceInfo& device) {
  DeviceInfo two = device;
  two.sms = 2;
  return make_planes(problem, two);
}

const GemmEntry kPlanesOfTwo = {"gemm_w4a16_planes_sm90", kGemmW4A16Sm90.accepts, make_for_two};

struct Shape {
  int64_t n, k;
  std::vector<int64_t> row_counts;
};

void check_shapes(const GemmEntry& entry,
                  std::string_view scheme,
                  const std::vector<Shape>& shapes) {
  for (const Shape& shape : shapes) {
    testing::check_gemm(entry, {.scheme = scheme,
                                .n = shape.n,
                                .k = shape.k,
                                .row_counts = shape.row_counts,
                                .tolerance = kTolerance,
                                .seed = static_cast<uint32_t>(shape.n + shape.k)});
  }
}

// Tiles of one slice and of many, more tiles than blocks, rows and K that end within a tile or
// within a pair.
void check_scheme(std::string_view scheme, int group) {
  if (!hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  constexpr int64_t kRows = 600, kDepth = 1792;
  for (const int64_t m : {1, 2}) {
    const W4A16PlanesPlan several = plan_w4a16_planes(kRows, kDepth, group, m, 2);
    EXPECT_EQ(several.tiles, 2 * several.blocks);
    EXPECT_LT(several.stages, 2 * (kDepth / 128 >> several.step_shift));  // are filled again
  }
  check_shapes(kPlanesOfTwo, scheme, {{kRows, kDepth, {1, 2}}});
  check_shapes(kPlanes, scheme, {{200, 640, {1}}});
  if (group == 32) {
    check_shapes(kPlanes, scheme, {{130, 96, {1, 2}}});
  }
  if (testing::brief_tests()) {
    return;
  }
  check_shapes(kPlanes, scheme,
               {{64, 128, {1, 2}},
                {200, 1280, {1, 2}},
                {2051, 640, {1, 2}},
                {6160, 1024, {1}},
                {9000, 384, {2}},
                {40000, 256, {1, 2}},
                {1040, 4224, {1}},
                {4200, 1152, {2}},
                {16, 5120, {1, 2}}});
  if (group == 32) {
    check_shapes(kPlanes, scheme, {{130, 1312, {1, 2}}});
  }
}

TEST(GemmW4A16PlanesSm90, ClustersEqualTheReference) {
  constexpr int64_t kShort = 6656;
  for (const int group : {32, 128}) {
    for (const int64_t m : {1, 2}) {
      ASSERT_EQ(plan_w4a16_planes(16, kShort, group, m, 132).cluster_shift, 1);
    }
  }
  NIBBLE_NEEDS_GPU();
  if (!hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  for (const std::string_view scheme : {"w4a16_g128", "w4a16_g32"}) {
    check_shapes(kPlanes, scheme, {{16, kShort, {1, 2}}});
    if (!testing::brief_tests()) {
      check_shapes(kPlanes, scheme, {{64, 8192, {1, 2}}, {16, 14336, {1, 2}}});
    }
  }
}

TEST(GemmW4A16PlanesSm90, GroupsOf128EqualTheReference) {
  NIBBLE_NEEDS_GPU();
  check_scheme("w4a16_g128", 128);
}

TEST(GemmW4A16PlanesSm90, GroupsOf32EqualTheReference) {
  NIBBLE_NEEDS_GPU();
  check_scheme("w4a16_g32", 32);
}

// Weights and activations of chosen kinds, F32 results.
class Product {
 public:
  Product(std::string_view scheme, int64_t m) : m_(m) {
    const WeightFormat format = find_scheme(scheme).value().weight;
    weight_ = QuantTensor::allocate(format, kN, kK).value();
    std::mt19937 random(7);
    auto* codes = reinterpret_cast<uint8_t*>(weight_.codes.data());
    for (size_t i = 0; i < weight_.codes.size(); ++i) {
      codes[i] = static_cast<uint8_t>(random());
    }
    for (float& scale : weight_.scales.as<float>()) {
      scale = bf16_to_f32(f32_to_bf16(0.01F + 1e-9F * static_cast<float>(random() % 10000000)));
    }
    kernel_ =
        kGemmW4A16Sm90.make({.weight = format, .n = kN, .k = kK}, query_device(0).value()).value();
  }

  // y [m, n]; x is rounded to BF16 first.
  std::vector<float> run(std::vector<float>& x) {
    std::vector<uint16_t> rounded;
    for (float& value : x) {
      rounded.push_back(f32_to_bf16(value));
      value = bf16_to_f32(rounded.back());
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(weight_.codes.data());
    const auto scales = weight_.scales.as<float>();
    const testing::DeviceArray<uint8_t> codes(
        std::vector<uint8_t>(bytes, bytes + weight_.codes.size()));
    const testing::DeviceArray<float> device_scales(
        std::vector<float>(scales.begin(), scales.end()));
    const testing::DeviceArray<uint8_t> packed(kernel_->packed_bytes());
    const testing::DeviceArray<uint16_t> device_x(rounded);
    testing::DeviceArray<uint8_t> workspace(kernel_->workspace_bytes(m_));
    workspace.zero();
    const testing::DeviceArray<float> y(static_cast<size_t>(m_ * kN));
    EXPECT_EQ(kernel_->pack(codes.data(), device_scales.data(), packed.data(), nullptr),
              cudaSuccess);
    EXPECT_EQ(kernel_->run({.x = device_x.data(),
                            .packed = packed.data(),
                            .y = y.data(),
                            .y_stride = kN,
                            .m = m_,
                            .result = GemmResult::kF32,
                            .workspace = workspace.data()},
                           {}),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return y.host();
  }

  // Every result lies within what planes and sums in f32 may lose.
  void expect_near(const std::vector<float>& y, const std::vector<float>& x, int64_t token) {
    std::vector<float> row(kK);
    for (int64_t n = 0; n < kN; ++n) {
      decode_row(weight_, n, row.data());
      double want = 0.0, bound = 0.0;
      for (int64_t k0 = 0; k0 < kK; k0 += 128) {
        double largest = 0.0, weights = 0.0;
        for (int64_t k = k0; k < k0 + 128; ++k) {
          const double value = x[static_cast<size_t>(token * kK + k)];
          const double w = row[static_cast<size_t>(k)];
          want += value * w;
          bound += std::fabs(value * w) * 0x1p-21;
          largest = std::max(largest, std::fabs(value));
          weights += std::fabs(w);
        }
        bound += largest * weights * 0x1p-22;
      }
      ASSERT_NEAR(y[static_cast<size_t>(token * kN + n)], want, bound + 1e-30)
          << "row " << n << " token " << token;
    }
  }

  static constexpr int64_t kN = 96, kK = 1024;

 private:
  int64_t m_;
  QuantTensor weight_;
  std::unique_ptr<GemmKernel> kernel_;
};

TEST(GemmW4A16PlanesSm90, KeepsWhatOutliersLeave) {
  NIBBLE_NEEDS_GPU();
  if (!hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  const std::function<float(size_t, float)> kinds[] = {
      [](size_t i, float value) { return i % 100 == 3 ? 1e4F * value : 1e-3F * value; },
      [](size_t i, float value) { return std::ldexp(value, -static_cast<int>(i % 40)); },
      [](size_t i, float value) { return i / 128 % 3 == 1 ? 0.0F : value; },
      [](size_t, float) { return 0.0F; },
      [](size_t i, float) { return i % 7 == 0 ? -1.9921875F : 1.9921875F; },
      [](size_t i, float value) { return i / 128 % 2 == 0 ? 1e-36F * value : 1e-20F * value; },
      [](size_t, float value) { return 1e30F * value; }};
  for (const std::string_view scheme : {"w4a16_g128", "w4a16_g32"}) {
    for (const int64_t m : {1, 2}) {
      Product product(scheme, m);
      for (size_t kind = 0; kind < std::size(kinds); ++kind) {
        SCOPED_TRACE(::testing::Message() << scheme << " m " << m << " kind " << kind);
        std::vector<float> x =
            testing::random_values(static_cast<size_t>(m * Product::kK), 5, 1.0F);
        for (size_t i = 0; i < x.size(); ++i) {
          x[i] = kinds[kind](i, x[i]);
        }
        const std::vector<float> y = product.run(x);
        for (int64_t token = 0; token < m; ++token) {
          product.expect_near(y, x, token);
        }
      }
    }
  }
}

TEST(GemmW4A16PlanesSm90, InfinitiesAndNansMakeNans) {
  NIBBLE_NEEDS_GPU();
  if (!hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  const float bad[] = {
      std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
      std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};
  for (const int64_t m : {1, 2}) {
    Product product("w4a16_g128", m);
    for (const float value : bad) {
      for (const int64_t token : {int64_t{0}, m - 1}) {
        std::vector<float> x =
            testing::random_values(static_cast<size_t>(m * Product::kK), 6, 1.0F);
        x[static_cast<size_t>(token * Product::kK + 777)] = value;
        const std::vector<float> y = product.run(x);
        for (int64_t t = 0; t < m; ++t) {
          if (t != token) {
            product.expect_near(y, x, t);
            continue;
          }
          for (int64_t n = 0; n < Product::kN; ++n) {
            ASSERT_TRUE(std::isnan(y[static_cast<size_t>(t * Product::kN + n)])) << "row " << n;
          }
        }
      }
    }
  }
}

TEST(GemmW4A16PlanesSm90, PlansFit) {
  for (const int64_t n : {16, 64, 200, 2051, 6144, 8192, 28672, 40000, 128256}) {
    for (const int64_t k : {32, 128, 640, 4096, 14336, 28672}) {
      for (int64_t m = 1; m <= kW4A16PlanesTokens; ++m) {
        for (const int sms : {8, 114, 132}) {
          for (const int group : {32, 128}) {
            const W4A16PlanesPlan plan = plan_w4a16_planes(n, k, group, m, sms);
            SCOPED_TRACE(::testing::Message() << n << " x " << k << " m " << m << " sms " << sms);
            if (plan.blocks == 0) {
              EXPECT_GT(m * k, 28672);
              continue;
            }
            EXPECT_GE(plan.tile * plan.tiles, plan.slices);
            EXPECT_LE(plan.tile, kW4A16PlanesWarps);
            EXPECT_LE(plan.blocks, sms);
            EXPECT_EQ(plan.tile_slices * plan.tiles + plan.larger_tiles, plan.slices);
            EXPECT_EQ(plan.blocks % (1 << plan.cluster_shift), 0);
            EXPECT_GE(2 * plan.row_warps, plan.tile);
            EXPECT_LE(plan.row_warps << plan.k_shift, kW4A16PlanesWarps);
            EXPECT_LE(plan.step_shift, plan.k_shift);
            // Sets of warps have different stages.
            const int steps =
                static_cast<int>((k + 127) / 128 >> plan.cluster_shift >> plan.step_shift);
            const int sets = 1 << (plan.k_shift - plan.step_shift);
            EXPECT_GE(plan.stages, std::min(sets, steps));
            EXPECT_TRUE(plan.stages % sets == 0 || plan.stages >= steps) << plan.stages;
            EXPECT_LE(plan.shared_bytes, kW4A16PlanesMostShared);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
