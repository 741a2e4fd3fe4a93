#include "backend/cuda/cuda_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/random_blocks.h"
#include "base/f16.h"
#include "ops/gemm.h"
#include "quant/testing/random_levels.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kColumns = 256, kRows = 7;
constexpr int64_t kCounts[] = {192, 64, 40, 88};  // of the parts
constexpr int64_t kAll = 384;

QuantTensor random_weight(const WeightFormat& format, int64_t n, uint32_t seed) {
  QuantTensor weight = QuantTensor::allocate(format, n, kColumns).value();
  std::mt19937 random(seed);
  std::ranges::generate(weight.codes.as<uint8_t>(), [&] {
    const auto byte = static_cast<uint8_t>(random());
    return format.code == WeightCode::kFp8E4M3 && (byte & 0x7fU) == 0x7fU ? uint8_t{1} : byte;
  });
  if (format.code == WeightCode::kBf16) {
    for (uint16_t& half : weight.codes.as<uint16_t>()) {
      half = f32_to_bf16(static_cast<float>(half) * 0x1p-17F);
    }
  }
  std::ranges::generate(weight.scales.as<float>(), [&] {
    return format.scale_dtype == DType::kF8E8M0 ? std::ldexp(1.0F, -static_cast<int>(random() % 16))
                                                : static_cast<float>(random() % 128 + 1) / 1024.0F;
  });
  make_levels(weight, random);
  return weight;
}

std::unique_ptr<PreparedGemm> stack(Backend& backend,
                                    const std::vector<QuantTensor>& parts,
                                    const ActSpec& act) {
  std::vector<QuantView> views;
  for (const QuantTensor& part : parts) {
    views.push_back(view_of(part));
  }
  return backend.prepare_gemm(views, act, kRows).value();
}

std::vector<float> random_pairs() {  // of BF16 numbers: rows of x
  std::vector<float> pairs(kRows * kColumns / 2);
  std::mt19937 random(3);
  std::ranges::generate(pairs, [&] {
    return std::bit_cast<float>((static_cast<uint32_t>(random()) & 0x80ff80ffU) | 0x3f003f00U);
  });
  return pairs;
}

DeviceBuffer upload_bf16(Backend& backend, const std::vector<uint16_t>& values) {
  std::vector<float> pairs(values.size() / 2);
  std::memcpy(pairs.data(), values.data(), values.size() * sizeof(uint16_t));
  return backend.upload(pairs).value();
}

/// Of kRows rows in BF16.
std::vector<float> product_of(Backend& backend, PreparedGemm& gemm, const DeviceBuffer& x) {
  const DeviceBuffer y = backend.allocate(kRows * kAll * sizeof(float)).value();
  gemm.run({.x = {x.as<void>(), DType::kBF16},
            .x_stride = kColumns,
            .m = kRows,
            .y = y.as<float>(),
            .y_stride = kAll});
  std::vector<float> out(kRows * kAll);
  backend.read(y.as<float>(), out);
  return out;
}

std::vector<float> product(Backend& backend, PreparedGemm& gemm) {
  return product_of(backend, gemm, backend.upload(random_pairs()).value());
}

void expect_same(const QuantTensor& a, const QuantTensor& b) {
  EXPECT_TRUE(std::ranges::equal(a.codes.as<uint8_t>(), b.codes.as<uint8_t>()));
  EXPECT_TRUE(std::ranges::equal(a.scales.as<float>(), b.scales.as<float>()));
}

TEST(CudaGemm, UpdatesAPartOfStackedMatricesInPlace) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const QuantScheme& scheme : all_schemes()) {
    const ActSpec act =
        scheme.act == ActFormat::kFloat ? ActFormat::kBf16 : random_act(scheme, kColumns, 5);
    if (!backend->check_gemm(scheme.weight, act, kColumns).ok()) {
      continue;
    }
    std::vector<QuantTensor> parts;
    for (const int64_t count : kCounts) {
      parts.push_back(random_weight(scheme.weight, count, 1));
    }
    const auto gemm = stack(*backend, parts, act);
    const auto* codes = dynamic_cast<CudaGemm&>(*gemm).codes().get();
    int64_t first = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << scheme.name << ", part " << i);
      parts[i] = random_weight(scheme.weight, kCounts[i], 2 + static_cast<uint32_t>(i));
      ASSERT_TRUE(gemm->update(first, parts[i]).ok());
      first += kCounts[i];
      const auto fresh = stack(*backend, parts, act);
      expect_same(gemm->unpack().value(), fresh->unpack().value());
      EXPECT_EQ(product(*backend, *gemm), product(*backend, *fresh));
    }
    EXPECT_EQ(dynamic_cast<CudaGemm&>(*gemm).codes().get(), codes);
    const QuantTensor before = gemm->unpack().value();
    EXPECT_EQ(gemm->update(kAll - 1, parts[0]).code(), StatusCode::kInvalidArgument);
    expect_same(gemm->unpack().value(), before);
  }
}

// Rows are rounded and ordered by one kernel and multiplied by another; one of them is not finite.
TEST(CudaGemm, OfBlocksOfInt8AndBf16IsNearTheReference) {
  NIBBLE_NEEDS_GPU();
  const QuantScheme scheme = find_scheme("w4a8_bf16").value();
  const QuantTensor weight = random_weight(scheme.weight, kAll, 1);
  std::vector<float> x = testing::random_values(kRows * kColumns, 2, 1.0F);
  for (size_t i = 0; i < x.size(); i += 37) {
    x[i] *= 20.0F;
  }
  x[4 * kColumns + 100] = std::numeric_limits<float>::infinity();
  std::vector<uint16_t> bits(x.size());
  std::ranges::transform(x, bits.begin(), f32_to_bf16);
  std::ranges::transform(bits, x.begin(), bf16_to_f32);
  for (const char* kernel : {"gemm_w4a8_bf16_sm80", ""}) {
    const CudaBackendOptions options{.kernels = std::string_view(kernel).empty()
                                                    ? std::vector<std::string>{}
                                                    : std::vector<std::string>{kernel}};
    const auto backend = make_cuda_backend(options).value();
    for (const uint32_t seed : {1, 2, 3}) {
      ActSpec act = random_act(scheme, kColumns, seed);
      if (seed == 3) {
        std::vector<int32_t> columns(kColumns);
        std::iota(columns.begin(), columns.end(), 0);
        std::ranges::shuffle(columns, std::mt19937(seed));
        act.columns = std::make_shared<const std::vector<int32_t>>(std::move(columns));
      }
      const auto gemm = backend->prepare_gemm(weight, act, kRows).value();
      SCOPED_TRACE(::testing::Message() << gemm->kernel_name() << ", seed " << seed);
      std::vector<float> wanted(kRows * kAll);
      reference_gemm(
          weight, act,
          {.x = x.data(), .x_stride = kColumns, .m = kRows, .y = wanted.data(), .y_stride = kAll});
      const DeviceBuffer device_x = upload_bf16(*backend, bits);
      const std::vector<float> got = product_of(*backend, *gemm, device_x);
      double squares = 0, total = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        const bool spoiled = i / kAll == 4;
        ASSERT_EQ(std::isnan(got[i]), spoiled) << "output " << i;
        ASSERT_EQ(std::isnan(wanted[i]), spoiled) << "output " << i;
        const double gap = spoiled ? 0.0 : static_cast<double>(got[i]) - wanted[i];
        squares += gap * gap;
        total += spoiled ? 0.0 : static_cast<double>(wanted[i]) * wanted[i];
      }
      // The reference rounds numbers of BF16 to multiples of 2^-13 of the power of two in a block's
      // largest, which is 7e-5 of the others.
      EXPECT_LE(std::sqrt(squares / total), 1.5e-4);
    }
  }
}

TEST(CudaGemm, TakesRowsThatLieApart) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const std::string_view name : {"w4a16_g32", "w8a8_int8", "bf16"}) {
    const QuantScheme scheme = find_scheme(name).value();
    const QuantTensor weight = random_weight(scheme.weight, kAll, 1);
    const auto bytes = static_cast<size_t>(weight.row_bytes());
    std::vector<std::byte> fused(2 * kAll * bytes, std::byte{1});
    for (size_t row = 0; row < kAll; ++row) {
      std::copy_n(weight.codes.data() + row * bytes, bytes, fused.data() + 2 * row * bytes);
    }
    QuantView view = view_of(weight);
    view.codes = fused.data();
    view.row_stride = 2 * weight.row_bytes();
    const auto gemm = backend->prepare_gemm({&view, 1}, scheme.act, kRows).value();
    expect_same(gemm->unpack().value(), weight);
  }
}

// What GGUF files call Q4_0, Q4_1 and Q8_0; eleven bits of a scale become eight.
TEST(CudaGemm, RoundsScalesAndMinimumsInF16ToBf16) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  std::mt19937 random(7);
  const auto halves = [&random](std::span<float> out) {
    std::ranges::generate(out, [&] { return static_cast<float>(random() % 1024 + 1024) / 65536; });
  };
  const auto rounded = [](std::span<float> out) {
    std::ranges::transform(out, out.begin(), [](float x) { return bf16_to_f32(f32_to_bf16(x)); });
  };
  for (const auto& [code, zero_points] : {std::pair(WeightCode::kInt4, ZeroPoints::kNone),
                                          std::pair(WeightCode::kInt4, ZeroPoints::kMinimum),
                                          std::pair(WeightCode::kInt8, ZeroPoints::kNone)}) {
    const WeightFormat format{code, ScalePer::kGroup, 32, DType::kF16, zero_points};
    std::vector<QuantTensor> parts;
    for (const int64_t count : kCounts) {
      parts.push_back(random_weight(format, count, static_cast<uint32_t>(count)));
      halves(parts.back().scales.as<float>());
      halves(parts.back().minimums.as<float>());
    }
    const auto gemm = stack(*backend, parts, ActFormat::kBf16);  // which also checks the product
    const std::vector<float> before = product(*backend, *gemm);
    QuantTensor part = random_weight(format, kCounts[1], 99);
    halves(part.scales.as<float>());
    halves(part.minimums.as<float>());
    ASSERT_TRUE(gemm->update(kCounts[0], part).ok());
    const QuantTensor unpacked = gemm->unpack().value();
    std::swap(parts[1], part);
    const auto fresh = stack(*backend, parts, ActFormat::kBf16);
    EXPECT_EQ(product(*backend, *gemm), product(*backend, *fresh));
    EXPECT_NE(product(*backend, *gemm), before);
    const auto groups = static_cast<size_t>(format.groups(kColumns));
    size_t first = 0;
    for (QuantTensor& expected : parts) {
      rounded(expected.scales.as<float>());
      rounded(expected.minimums.as<float>());
      const size_t count = static_cast<size_t>(expected.n) * groups;
      EXPECT_TRUE(std::ranges::equal(unpacked.scales.as<float>().subspan(first, count),
                                     expected.scales.as<float>()));
      if (zero_points == ZeroPoints::kMinimum) {
        EXPECT_TRUE(std::ranges::equal(unpacked.minimums.as<float>().subspan(first, count),
                                       expected.minimums.as<float>()));
      }
      first += count;
    }
  }
}

TEST(CudaGemm, ReadsRowsThatAnotherProductRounded) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  const auto prepare = [&](std::string_view name) {
    const QuantScheme scheme = find_scheme(name).value();
    return backend->prepare_gemm(random_weight(scheme.weight, kAll, 1), scheme.act, kRows).value();
  };
  const auto int4 = prepare("w4a8"), int8 = prepare("w8a8_int8"), fp8 = prepare("w8a8_fp8");
  EXPECT_FALSE(fp8->reads_rows_of(*int8, kRows));
  ASSERT_TRUE(int4->reads_rows_of(*int8, kRows));
  const std::vector<float> expected = product(*backend, *int4);
  product(*backend, *fp8);  // its rows are the last
  const DeviceBuffer x = backend->upload(random_pairs()).value();
  const DeviceBuffer y = backend->allocate(kRows * kAll * sizeof(float)).value();
  const GemmArgs args{.x = {x.as<void>(), DType::kBF16},
                      .x_stride = kColumns,
                      .m = kRows,
                      .y = y.as<float>(),
                      .y_stride = kAll};
  int8->round_rows(args);
  int4->multiply(args);
  std::vector<float> out(kRows * kAll);
  backend->read(y.as<float>(), out);
  EXPECT_EQ(out, expected);
}

TEST(CudaBackend, KernelsAreChosenByName) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({.kernels = {"gemm_w4a16_sm80"}}).value();
  const WeightFormat int4{WeightCode::kInt4, ScalePer::kGroup, 128, DType::kBF16};
  const auto chosen = backend->prepare_gemm(random_weight(int4, 128, 1), ActFormat::kBf16, 1);
  EXPECT_EQ((*chosen)->kernel_name(), "gemm_w4a16_sm80");
  const auto other = backend->prepare_gemm(random_weight({}, 128, 1), ActFormat::kBf16, 1);
  EXPECT_NE((*other)->kernel_name(), "gemm_w4a16_sm80");
  EXPECT_TRUE(backend->prepare_steps({.rows = 1, .sequences = 1, .positions = 64}).ok());

  const Status unknown = make_cuda_backend({.kernels = {"gemm_w4a16_avx2"}}).status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.message().find("gemm_bf16_sm80"), std::string::npos) << unknown.message();
  const auto useless = make_cuda_backend({.kernels = {"gemm_w4a8_sm80"}}).value();
  ASSERT_TRUE(useless->prepare_gemm(random_weight({}, 128, 1), ActFormat::kBf16, 1).ok());
  EXPECT_EQ(useless->prepare_steps({.rows = 1, .sequences = 1, .positions = 64}).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble::cuda
