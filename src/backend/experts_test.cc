#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_experts.h"
#include "base/f16.h"
#include "ops/gemm.h"
#include "ops/route.h"
#include "quant/scheme.h"

namespace nibble {
namespace {

std::vector<std::unique_ptr<Backend>> backends() {
  std::vector<std::unique_ptr<Backend>> all;
  for (const std::string_view isa : cpu::supported_isas()) {
    all.push_back(
        make_cpu_backend({.threads = 3, .isa = std::string(isa), .limit = ThreadLimit::kNone})
            .value());
  }
  return all;
}

/// y of m rows that hold 1 before; NaN between the rows.
std::vector<float> run(PreparedExperts& experts, ConstActivations x, int64_t m, int64_t hidden) {
  const int64_t stride = hidden + 3;
  std::vector<float> y(static_cast<size_t>(m * stride), std::numeric_limits<float>::quiet_NaN());
  for (int64_t row = 0; row < m; ++row) {
    std::fill_n(y.begin() + row * stride, hidden, 1.0F);
  }
  experts.run({.x = x, .x_stride = hidden + 5, .m = m, .y = y.data(), .y_stride = stride});
  std::vector<float> dense;
  for (int64_t row = 0; row < m; ++row) {
    dense.insert(dense.end(), y.begin() + row * stride, y.begin() + row * stride + hidden);
    for (int64_t i = hidden; i < stride; ++i) {
      EXPECT_TRUE(std::isnan(y[static_cast<size_t>(row * stride + i)]));
    }
  }
  return dense;
}

std::vector<float> expected_of(const ReferenceExperts& weights,
                               const std::vector<float>& x,
                               int64_t m) {
  const int64_t hidden = weights.router.k;
  std::vector<float> y(static_cast<size_t>(m * hidden), 1.0F);
  reference_experts(
      weights, {.x = x.data(), .x_stride = hidden + 5, .m = m, .y = y.data(), .y_stride = hidden});
  return y;
}

/// x [rows, hidden + 5] of BF16 numbers, as F32.
std::vector<float> random_rows(int64_t rows, int64_t hidden, uint32_t seed) {
  return to_f32(to_bf16(random_floats(rows * (hidden + 5), seed)));
}

// Activations of the second product may be rounded the other way: they are sums.
TEST(Experts, OfEveryRunSchemeEqualTheReference) {
  constexpr int64_t kRows = 40;
  for (const QuantScheme& scheme : all_schemes()) {
    for (const ExpertsShape& shape : {ExpertsShape{6, 2, 256, 128}, {5, 3, 128, 256}}) {
      for (const DType between : {DType::kF32, DType::kBF16}) {
        RandomExperts layer(scheme, shape, between);
        if (shape.experts == 5) {
          layer.add_biases();
          layer.weights.form.activation = GemmInput::Kind::kClampedSwiglu;
          layer.weights.form.limit = 7.0F;
          layer.weights.form.router.scores = RouterScores::kSoftmaxOfChosen;
        } else {
          layer.weights.form.router.renormalise = true;
        }
        const std::vector<float> x = random_rows(kRows, shape.hidden, 5);
        const std::vector<float> expected = expected_of(layer.weights, x, kRows);
        std::vector<float> first;
        for (const auto& backend : backends()) {
          SCOPED_TRACE(testing::Message() << scheme.name << " " << backend->name() << " of "
                                          << shape.experts << ", " << dtype_name(between));
          auto experts = backend->prepare_experts(layer.request(kRows));
          ASSERT_TRUE(experts.ok()) << experts.status().message();
          const auto narrow = to_bf16(x);
          const ConstActivations rows = between == DType::kF32
                                            ? ConstActivations(x.data())
                                            : ConstActivations(narrow.data(), DType::kBF16);
          const std::vector<float> y = run(**experts, rows, kRows, shape.hidden);
          const double other_way = between == DType::kBF16 ? 1e-2 : 4e-3;
          const bool blocks = scheme.act == ActFormat::kIntBlocks;  // with steps of 4 bits
          EXPECT_LT(relative_error(y, expected), blocks ? 3e-2 : other_way);
          if (first.empty()) {
            first = y;
          }
          EXPECT_EQ(y, first) << "another instruction set gives other bits";
          for (const int64_t m : {int64_t{1}, int64_t{3}, int64_t{17}}) {
            const std::vector<float> fewer = run(**experts, rows, m, shape.hidden);
            EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), y.begin())) << "m = " << m;
          }
        }
      }
    }
  }
}

// Gate and up of all experts read rows that are rounded once; what each down reads is its own.
TEST(Experts, EachDownReadsRowsInItsOwnOrderAndBlocks) {
  constexpr int64_t kRows = 37;
  constexpr ExpertsShape kShape{5, 3, 128, 256};
  for (const char* name : {"w4ax", "w4ax_b32", "w4ax_class", "w4a8_bf16", "w4a8", "w4a16_g32"}) {
    const QuantScheme scheme = find_scheme(name).value();
    for (const DType between : {DType::kF32, DType::kBF16}) {
      RandomExperts layer(scheme, kShape, between);
      const std::vector<float> x = random_rows(kRows, kShape.hidden, 9);
      const std::vector<float> alike = expected_of(layer.weights, x, kRows);
      layer.mix_down_acts(scheme);
      const std::vector<float> expected = expected_of(layer.weights, x, kRows);
      EXPECT_GT(relative_error(alike, expected), 0.1);
      const auto narrow = to_bf16(x);
      const ConstActivations rows = between == DType::kF32
                                        ? ConstActivations(x.data())
                                        : ConstActivations(narrow.data(), DType::kBF16);
      std::vector<float> first;
      for (const auto& backend : backends()) {
        SCOPED_TRACE(testing::Message() << name << " " << backend->name());
        auto experts = backend->prepare_experts(layer.request(kRows));
        ASSERT_TRUE(experts.ok()) << experts.status().message();
        const std::vector<float> y = run(**experts, rows, kRows, kShape.hidden);
        EXPECT_LT(relative_error(y, expected), 3e-2);
        first = first.empty() ? y : first;
        EXPECT_EQ(y, first) << "another instruction set gives other bits";
        for (const int64_t m : {int64_t{1}, int64_t{3}}) {
          const std::vector<float> fewer = run(**experts, rows, m, kShape.hidden);
          EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), y.begin())) << "m = " << m;
        }
      }
    }
  }
}

TEST(Experts, FormsOfDownsRowsAreOneOrOneOfEach) {
  const QuantScheme scheme = find_scheme("w4ax_b32").value();
  const auto backend = make_cpu_backend({.threads = 1}).value();
  RandomExperts layer(scheme, {3, 2, 64, 32}, DType::kF32);
  layer.mix_down_acts(scheme);
  EXPECT_TRUE(backend->prepare_experts(layer.request(4)).ok());
  const auto refused = [&] { return backend->prepare_experts(layer.request(4)).status().code(); };
  layer.weights.form.down_acts[1] = ActFormat::kInt8Token;
  EXPECT_EQ(refused(), StatusCode::kInvalidArgument);
  layer.weights.form.down_acts.resize(1);
  EXPECT_EQ(refused(), StatusCode::kInvalidArgument);
  layer.weights.form.down_acts.clear();
  layer.mix_down_acts(scheme);
  BlockPrecision more = *layer.weights.form.down_acts[2].blocks;
  more.bits.push_back(4);
  layer.weights.form.down_acts[2].blocks = std::make_shared<const BlockPrecision>(more);
  EXPECT_EQ(refused(), StatusCode::kInvalidArgument);
}

TEST(Experts, AreUnpackedAndReplacedOneByOne) {
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  constexpr ExpertsShape kShape{4, 2, 128, 96};
  for (const auto& backend : backends()) {
    RandomExperts layer(scheme, kShape, DType::kF32);
    auto experts = backend->prepare_experts(layer.request(8)).value();
    for (int64_t e = 0; e < kShape.experts; ++e) {
      for (const ExpertPart part : {ExpertPart::kGateUp, ExpertPart::kDown}) {
        const QuantTensor& given = part == ExpertPart::kGateUp
                                       ? layer.weights.gate_up[static_cast<size_t>(e)]
                                       : layer.weights.down[static_cast<size_t>(e)];
        const QuantTensor got = experts->unpack(e, part).value();
        EXPECT_TRUE(std::ranges::equal(got.codes.as<uint8_t>(), given.codes.as<uint8_t>()));
        EXPECT_TRUE(std::ranges::equal(got.scales.as<float>(), given.scales.as<float>()));
      }
    }
    layer.weights.gate_up[2] = random_weight(scheme.weight, {192, 128}, 99).value();
    ASSERT_TRUE(experts->update(2, ExpertPart::kGateUp, 0, layer.weights.gate_up[2]).ok());
    layer.weights.down[3] = random_weight(scheme.weight, {128, 96}, 98).value();
    ASSERT_TRUE(experts->update(3, ExpertPart::kDown, 0, layer.weights.down[3]).ok());
    const std::vector<float> x = random_rows(8, 128, 6);
    EXPECT_LT(relative_error(run(*experts, x.data(), 8, 128), expected_of(layer.weights, x, 8)),
              1e-5);
    EXPECT_EQ(experts->update(4, ExpertPart::kDown, 0, layer.weights.down[3]).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(experts->update(0, ExpertPart::kDown, 1, layer.weights.down[3]).code(),
              StatusCode::kInvalidArgument);
  }
}

// Every row to the same experts, and rows that a NaN leads anywhere.
TEST(Experts, TakeAnyRouting) {
  const QuantScheme scheme = find_scheme("w8a8_int8").value();
  constexpr ExpertsShape kShape{64, 4, 64, 32};
  constexpr int64_t kRows = 600;
  RandomExperts layer(scheme, kShape, DType::kF32);
  layer.weights.router_bias.assign(64, 0.0F);
  for (const int expert : {3, 17, 18, 63}) {
    layer.weights.router_bias[static_cast<size_t>(expert)] = 1000.0F;
  }
  std::vector<float> x = random_rows(kRows, kShape.hidden, 7);
  const auto backend = make_cpu_backend({.threads = 2}).value();
  auto experts = backend->prepare_experts(layer.request(kRows)).value();
  EXPECT_EQ(backend->expert_counts(), ExpertCounts());
  const std::vector<float> y = run(*experts, x.data(), kRows, kShape.hidden);
  const ExpertCounts counts = backend->expert_counts();
  EXPECT_EQ(counts, (ExpertCounts{.runs = 1, .active = 4, .slots = 2400, .rows_max = 600}));
  EXPECT_EQ(counts.active_mean(), 4);
  EXPECT_EQ(counts.max_over_mean(), 1);
  EXPECT_LT(relative_error(y, expected_of(layer.weights, x, kRows)), 4e-3);
  x[5] = std::numeric_limits<float>::quiet_NaN();  // of row 0
  const std::vector<float> spoiled = run(*experts, x.data(), kRows, kShape.hidden);
  EXPECT_TRUE(std::isnan(spoiled[0]));
  EXPECT_TRUE(std::equal(y.begin() + kShape.hidden, y.end(), spoiled.begin() + kShape.hidden));
}

/// Notes what it is shown of some experts: by expert, rows of the step and theirs.
class Shown final : public ExpertObserver {
 public:
  [[nodiscard]] bool wants(int32_t expert) const override { return expert != 1; }
  void observe(int32_t expert, std::span<const int64_t> of, const float* rows) override {
    const int64_t k = width;
    for (const int64_t row : of) {
      seen[{expert, row}].assign(rows, rows + k);
      order.emplace_back(expert, row);
      rows += k;
    }
  }

  int64_t width = 0;
  std::map<std::pair<int32_t, int64_t>, std::vector<float>> seen;
  std::vector<std::pair<int32_t, int64_t>> order;
};

// Rows are those of the experts that other rows choose.
TEST(Experts, ShowTheirRows) {
  constexpr ExpertsShape kShape{5, 2, 64, 96};
  constexpr int64_t kRows = 40;
  RandomExperts layer(find_scheme("w8a8_int8").value(), kShape, DType::kF32);
  layer.add_biases();
  layer.weights.form.activation = GemmInput::Kind::kClampedSwiglu;
  layer.weights.form.limit = 7.0F;
  const int64_t stride = kShape.hidden + 5;
  const std::vector<float> x = random_rows(kRows, kShape.hidden, 5);
  const std::vector<float> choosers = random_rows(kRows, kShape.hidden, 6);
  for (const auto& backend : backends()) {
    auto experts = backend->prepare_experts(layer.request(kRows)).value();
    for (const ExpertPart part : {ExpertPart::kGateUp, ExpertPart::kDown}) {
      Shown shown;
      shown.width = part == ExpertPart::kGateUp ? kShape.hidden : kShape.width;
      experts->show_rows({.x = x.data(),
                          .chosen_by = choosers.data(),
                          .x_stride = stride,
                          .m = kRows,
                          .part = part},
                         shown);
      EXPECT_TRUE(std::ranges::is_sorted(shown.order));
      size_t expected = 0;
      for (int64_t row = 0; row < kRows; ++row) {
        std::vector<float> logits(kShape.experts);
        reference_gemm(layer.weights.router, ActFormat::kFloat,
                       {.x = choosers.data() + row * stride,
                        .x_stride = stride,
                        .m = 1,
                        .y = logits.data(),
                        .y_stride = kShape.experts,
                        .bias = layer.weights.router_bias.data()});
        std::vector<int32_t> chosen(kShape.top_k);
        std::vector<float> weights(kShape.top_k);
        reference_route({.logits = logits,
                         .correction = {},
                         .form = layer.weights.form.router,
                         .chosen = chosen,
                         .weights = weights});
        for (const int32_t expert : chosen) {
          if (!shown.wants(expert)) {
            continue;
          }
          ++expected;
          ASSERT_TRUE(shown.seen.contains({expert, row})) << expert << " of row " << row;
          const std::vector<float>& got = shown.seen[{expert, row}];
          if (part == ExpertPart::kGateUp) {
            EXPECT_TRUE(std::equal(got.begin(), got.end(), x.begin() + row * stride));
            continue;
          }
          std::vector<float> gate_up(2 * kShape.width);
          reference_gemm(layer.weights.gate_up[static_cast<size_t>(expert)], layer.weights.form.act,
                         {.x = x.data() + row * stride,
                          .x_stride = stride,
                          .m = 1,
                          .y = gate_up.data(),
                          .y_stride = 2 * kShape.width,
                          .bias = layer.weights.gate_up_bias.data() + expert * 2 * kShape.width});
          for (size_t i = 0; i < got.size(); ++i) {
            const double wanted = exact_activation(layer.weights.form.activation, gate_up[i],
                                                   gate_up[got.size() + i], 7.0);
            EXPECT_NEAR(got[i], wanted, 1e-4 * (1 + std::fabs(wanted)));
          }
        }
      }
      EXPECT_EQ(shown.seen.size(), expected);
    }
  }
}

TEST(Experts, OfDifferentFormsAreRefused) {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  RandomExperts layer(find_scheme("w4a16_g32").value(), {3, 2, 64, 32}, DType::kF32);
  RandomExperts other(find_scheme("w8a16_channel").value(), {3, 2, 64, 32}, DType::kF32);
  const ExpertsRequest good = layer.request(4);
  const ExpertsRequest theirs = other.request(4);
  layer.views[1].up = other.views[1].up;
  layer.views[1].up.name = "model.safetensors: tensor experts.1.up";
  const Status mixed = backend->prepare_experts(good).status();
  EXPECT_EQ(mixed.code(), StatusCode::kUnsupported);
  EXPECT_NE(mixed.message().find("experts.1.up"), std::string::npos);
  layer.views[1].up = layer.views[1].gate;
  layer.views[2].down.k = 64;
  EXPECT_EQ(backend->prepare_experts(good).status().code(), StatusCode::kCorrupt);
  layer.views[2].down.k = 32;
  ExpertsRequest many = layer.request(4);
  many.form.top_k = 4;
  EXPECT_EQ(backend->prepare_experts(many).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble
