// PreparedGemm::update() of some of the rows.

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "base/f16.h"
#include "quant/testing/random_levels.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 6;  // of activations: enough for tiles

/// Codes without NaN and scales that are BF16 numbers.
QuantTensor random_weight(const WeightFormat& format, int64_t n, int64_t k, uint32_t seed) {
  QuantTensor weight = QuantTensor::allocate(format, n, k).value();
  std::mt19937 random(seed);
  std::ranges::generate(weight.codes.as<uint8_t>(), [&] {
    const auto byte = static_cast<uint8_t>(random());
    return format.code == WeightCode::kFp8E4M3 && (byte & 0x7fU) == 0x7fU ? uint8_t{1} : byte;
  });
  if (format.code == WeightCode::kBf16 || format.code == WeightCode::kF16) {
    for (uint16_t& half : weight.codes.as<uint16_t>()) {
      half = f32_to_bf16(static_cast<float>(half) * 0x1p-17F);  // as F16 below 2, too
    }
  }
  std::ranges::generate(weight.scales.as<float>(),
                        [&] { return static_cast<float>(random() % 128 + 1) / 1024.0F; });
  make_levels(weight, random);
  return weight;
}

/// What the CPU multiplies: schemes, and forms that foreign checkpoints bring.
std::vector<QuantScheme> tested_schemes() {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  std::vector<QuantScheme> schemes = {
      {"f16", {WeightCode::kF16, ScalePer::kNone, 0, DType::kF32}},
      {"groups of 8", {WeightCode::kInt4, ScalePer::kGroup, 8, DType::kF32}},
      {"fixed", {WeightCode::kInt4, ScalePer::kGroup, 32, DType::kBF16}, ActFormat::kBf16}};
  for (const QuantScheme& scheme : all_schemes()) {
    if (!in_blocks(scheme.act) &&  // which block_acts_test.cc has
        backend->check_gemm(scheme.weight, scheme.act, 256).ok()) {
      schemes.push_back(scheme);
    }
  }
  return schemes;
}

std::unique_ptr<PreparedGemm> stack(Backend& backend,
                                    const std::vector<QuantTensor>& parts,
                                    ActFormat act) {
  std::vector<QuantView> views;
  views.reserve(parts.size());
  for (const QuantTensor& part : parts) {
    views.push_back(view_of(part));
  }
  return backend.prepare_gemm(views, act, kRows).value();
}

std::vector<uint32_t> product(PreparedGemm& gemm, const std::vector<float>& x, int64_t n) {
  const int64_t k = std::ssize(x) / kRows;
  std::vector<float> y(static_cast<size_t>(kRows * n), std::numeric_limits<float>::quiet_NaN());
  gemm.run({.x = x.data(), .x_stride = k, .m = kRows, .y = y.data(), .y_stride = n});
  std::vector<uint32_t> bits(y.size());
  std::memcpy(bits.data(), y.data(), y.size() * sizeof(float));
  return bits;
}

void expect_same(const QuantTensor& a, const QuantTensor& b) {
  EXPECT_TRUE(std::ranges::equal(a.codes.as<uint8_t>(), b.codes.as<uint8_t>()));
  EXPECT_TRUE(std::ranges::equal(a.scales.as<float>(), b.scales.as<float>()));
}

template <typename Fn>
void for_each_backend(const Fn& fn) {
  for (const std::string_view isa : cpu::supported_isas()) {
    const auto backend =
        make_cpu_backend({.threads = 2, .isa = std::string(isa), .limit = ThreadLimit::kNone})
            .value();
    SCOPED_TRACE(testing::Message() << isa);
    fn(*backend);
  }
}

// Parts begin and end inside tiles of 16 rows, lie within one, and go over several.
TEST(GemmUpdate, ReplacesAPartOfStackedMatrices) {
  constexpr int64_t kCounts[] = {21, 40, 5, 3};
  constexpr int64_t kAll = 69, kColumns = 256;
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  std::vector<float> x(kRows * kColumns);
  std::ranges::generate(x, [&] { return normal(random); });
  for_each_backend([&](Backend& backend) {
    for (const QuantScheme& scheme : tested_schemes()) {
      std::vector<QuantTensor> parts;
      for (const int64_t count : kCounts) {
        parts.push_back(random_weight(scheme.weight, count, kColumns, 1));
      }
      const auto gemm = stack(backend, parts, scheme.act);
      int64_t first = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        SCOPED_TRACE(testing::Message() << scheme.name << ", part " << i);
        parts[i] = random_weight(scheme.weight, kCounts[i], kColumns, 2 + static_cast<uint32_t>(i));
        ASSERT_TRUE(gemm->update(first, parts[i]).ok());
        first += kCounts[i];
        const auto fresh = stack(backend, parts, scheme.act);
        expect_same(gemm->unpack().value(), fresh->unpack().value());
        EXPECT_EQ(product(*gemm, x, kAll), product(*fresh, x, kAll));
      }
    }
  });
}

TEST(GemmUpdate, LeavesTheOldWeightsWhenItFails) {
  const WeightFormat format{WeightCode::kFp8E4M3, ScalePer::kChannel, 0, DType::kBF16};
  const QuantTensor weight = random_weight(format, 37, 40, 1);
  for_each_backend([&](Backend& backend) {
    const auto gemm = backend.prepare_gemm(weight, ActFormat::kFp8Token, 1).value();
    QuantTensor rows = random_weight(format, 9, 40, 2);
    EXPECT_EQ(gemm->update(29, rows).code(), StatusCode::kInvalidArgument);  // 28 is the last
    EXPECT_EQ(gemm->update(-1, rows).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(gemm->update(0, random_weight(format, 9, 48, 2)).code(),
              StatusCode::kInvalidArgument);
    const WeightFormat other{WeightCode::kInt8, ScalePer::kChannel, 0, DType::kBF16};
    EXPECT_EQ(gemm->update(0, random_weight(other, 9, 40, 2)).code(), StatusCode::kInvalidArgument);
    rows.scales.as<float>()[8] = 0.1F;  // no BF16 number
    EXPECT_EQ(gemm->update(12, rows).code(), StatusCode::kInvalidArgument);
    rows.scales.as<float>()[8] = 0.125F;
    rows.codes.as<uint8_t>()[8 * 40] = 0x7f;  // NaN
    EXPECT_EQ(gemm->update(12, rows).code(), StatusCode::kCorrupt);
    expect_same(gemm->unpack().value(), weight);
    rows.codes.as<uint8_t>()[8 * 40] = 1;
    EXPECT_TRUE(gemm->update(28, rows).ok());
  });
}

}  // namespace
}  // namespace nibble
