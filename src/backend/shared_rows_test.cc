#include <limits>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/random_blocks.h"
#include "backend/testing/random_gemm.h"
#include "quant/scheme.h"

// Rows that one product rounded and others read.
namespace nibble {
namespace {

constexpr int64_t kN = 37;
constexpr int64_t kK = 256;
constexpr int64_t kRows[] = {1, 3, 17};
constexpr int64_t kMost = 17;

struct Product {
  std::string scheme;
  std::unique_ptr<PreparedGemm> gemm;
};

std::vector<Product> products(Backend& backend) {
  std::vector<Product> all;
  for (const QuantScheme& scheme : all_schemes()) {
    const ActSpec act = random_act(scheme, kK, 3);
    if (!backend.check_gemm(scheme.weight, act, kK).ok()) {
      continue;
    }
    const auto seed = static_cast<uint32_t>(all.size());
    const QuantTensor weight = random_weight(scheme.weight, {kN, kK}, seed).value();
    all.push_back({std::string(scheme.name), backend.prepare_gemm(weight, act, kMost).value()});
  }
  return all;
}

class SharedRows : public testing::TestWithParam<std::string_view> {};

TEST_P(SharedRows, AreThoseThatTheReaderWouldHaveRounded) {
  const auto backend =
      make_cpu_backend({.threads = 2, .isa = std::string(GetParam()), .limit = ThreadLimit::kNone});
  ASSERT_TRUE(backend.ok());
  const std::vector<Product> all = products(**backend);
  const std::vector<float> x = random_floats(kMost * kK, 1);
  const std::vector<float> other_x = random_floats(kMost * kK, 2);
  const std::vector<float> norm(kK, 1.5F);
  std::set<std::string> shared;  // pairs of different schemes
  for (const int64_t m : kRows) {
    for (const Product& reader : all) {
      std::vector<float> expected(kMost * kN), y(kMost * kN);
      GemmArgs args{.x = x.data(), .x_stride = kK, .m = m, .y = expected.data(), .y_stride = kN};
      args.input = {.kind = GemmInput::Kind::kRmsNorm, .norm_weight = norm.data(), .eps = 1e-5F};
      reader.gemm->run(args);
      for (const Product& rounder : all) {
        if (!reader.gemm->reads_rows_of(*rounder.gemm, m)) {
          continue;
        }
        GemmArgs others = args;  // what lies in the device's memory is not the rows
        others.x = other_x.data();
        others.y = y.data();
        reader.gemm->run(others);
        args.y = y.data();
        std::ranges::fill(y, std::numeric_limits<float>::quiet_NaN());
        rounder.gemm->round_rows(args);
        reader.gemm->multiply(args);
        EXPECT_TRUE(std::equal(y.begin(), y.begin() + m * kN, expected.begin()))
            << reader.scheme << " of " << rounder.scheme << ", " << m << " rows";
        if (reader.scheme != rounder.scheme) {
          shared.insert(reader.scheme + " of " + rounder.scheme);
        }
      }
      EXPECT_TRUE(reader.gemm->reads_rows_of(*reader.gemm, m)) << reader.scheme;
    }
  }
  EXPECT_TRUE(shared.contains("w8a16_channel of bf16")) << testing::PrintToString(shared);
  EXPECT_FALSE(shared.contains("w8a8_fp8 of w8a8_int8"));
}

TEST(SharedRowsOfDifferentForms, AreNotRead) {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  const QuantScheme scheme = find_scheme("w8a8_int8").value();
  const auto prepare = [&](int64_t k, const ActSpec& act) {
    return backend->prepare_gemm(random_weight(scheme.weight, {kN, k}, 1).value(), act, kMost)
        .value();
  };
  ActSpec given = scheme.act;
  given.static_scale = 0.25F;
  const auto gemm = prepare(kK, scheme.act);
  EXPECT_TRUE(prepare(kK, scheme.act)->reads_rows_of(*gemm, 3));
  EXPECT_FALSE(prepare(2 * kK, scheme.act)->reads_rows_of(*gemm, 3));
  EXPECT_FALSE(prepare(kK, given)->reads_rows_of(*gemm, 3));
  EXPECT_FALSE(gemm->reads_rows_of(*prepare(kK, given), 3));
}

INSTANTIATE_TEST_SUITE_P(Isas, SharedRows, testing::ValuesIn(cpu::supported_isas()));

}  // namespace
}  // namespace nibble
