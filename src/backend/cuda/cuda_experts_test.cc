// Experts on the GPU against ops/reference.

#include "backend/cuda/cuda_experts.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/step_recorder.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/cuda/testing/run_experts.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_experts.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;
using testing::run;
using testing::run_on_cpu;

std::vector<float> expected_of(const ReferenceExperts& weights,
                               const std::vector<uint16_t>& x,
                               int64_t m) {
  const int64_t hidden = weights.router.k;
  std::vector<float> y(static_cast<size_t>(m * hidden), 1.0F);
  reference_experts(weights, {.x = {x.data(), DType::kBF16},
                              .x_stride = hidden,
                              .m = m,
                              .y = y.data(),
                              .y_stride = hidden});
  return y;
}

TEST(CudaExperts, OfEverySchemeEqualTheReference) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const char* name :
       {"bf16", "w8a16_channel", "w4a16_channel", "w4a16_g32", "w4a16_g128", "w4a16_g32_asym",
        "mxfp4", "mxfp4_fp8", "w4a8", "w4a8_g64", "w4a8_g128", "w8a8_int8", "w8a8_fp8",
        "w8a8_fp8_expert", "w8a8_fp8_block", "w4ax", "w4ax_b64", "w4ax_b32", "w4ax_class"}) {
    const QuantScheme scheme = find_scheme(name).value();
    for (const ExpertsShape& shape : {ExpertsShape{6, 2, 256, 128}, {40, 3, 128, 192}}) {
      SCOPED_TRACE(::testing::Message() << name << " of " << shape.experts);
      const bool whole_groups = scheme.weight.scale_per == ScalePer::kGroup;
      if (whole_groups && shape.width % std::max(1, scheme.weight.group_size) != 0) {
        continue;
      }
      RandomExperts layer(scheme, shape, DType::kBF16);
      const bool many = shape.experts == 40;
      if (many) {
        layer.add_biases();
        layer.weights.form.activation = GemmInput::Kind::kClampedSwiglu;
        layer.weights.form.limit = 7.0F;
        layer.weights.form.router.scores = RouterScores::kSoftmaxOfChosen;
      } else {
        layer.weights.form.router.renormalise = true;
      }
      constexpr int64_t kRows = 400;
      const auto x = to_bf16(random_values(static_cast<size_t>(kRows * shape.hidden), 7, 1.0F));
      const std::vector<float> expected = expected_of(layer.weights, x, kRows);
      auto experts = backend->prepare_experts(layer.request(kRows));
      ASSERT_TRUE(experts.ok()) << experts.status().message();
      const std::vector<float> whole = run(**experts, x, kRows, shape.hidden);
      // The tensor cores cut sums of E4M3 at 14 bits. Where that changes a row's maximum on its way
      // through BF16, the row is rounded by another scale: by a model of these sums, up to 3.5e-2
      // of a single row and 9e-3 of many.
      const bool single_rows_differ = scheme.act == ActFormat::kFp8Token;
      // A code of 4 bits of a row may be the next one: the activation is not the oracle's.
      const bool few_bits = in_blocks(scheme.act);
      const double tolerance = single_rows_differ ? 5e-2 : few_bits ? 3e-2 : 1e-2;
      EXPECT_LT(relative_error(whole, expected), single_rows_differ ? 2e-2 : 1e-2);
      for (const int64_t m : testing::row_counts({1, 3, 17, 40, 150}, {3})) {
        const std::vector<float> fewer = run(**experts, x, m, shape.hidden);
        const std::vector<float> first(expected.begin(), expected.begin() + m * shape.hidden);
        EXPECT_LT(relative_error(fewer, first), tolerance) << "m = " << m;
        if (is_integer(scheme.act)) {
          EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), whole.begin())) << "m = " << m;
        }
      }
    }
  }
}

// Slots of other devices' experts are dropped: what all of them add is what the whole layer adds.
TEST(CudaExperts, OfSharesAddUpToTheWholeLayer) {
  NIBBLE_NEEDS_GPU();
  constexpr ExpertsShape kShape{24, 3, 256, 128};
  constexpr int64_t kRanks = 4;
  const auto backend = make_cuda_backend({}).value();
  for (const char* name : {"w4a16_g32", "w4a8", "w8a8_fp8", "w4ax_b64"}) {
    const QuantScheme scheme = find_scheme(name).value();
    RandomExperts layer(scheme, kShape, DType::kBF16);
    layer.add_biases();
    if (in_blocks(scheme.act)) {
      layer.mix_down_acts(scheme);
    }
    for (const int64_t rows : {1, 4, 17, 400}) {
      SCOPED_TRACE(::testing::Message() << name << ", " << rows << " rows");
      const auto x = to_bf16(random_values(static_cast<size_t>(rows * kShape.hidden), 7, 1.0F));
      const ExpertsRequest request = layer.request(rows);
      auto whole = backend->prepare_experts(request).value();
      const std::vector<float> expected = run(*whole, x, rows, kShape.hidden);
      std::vector<float> sum(expected.size(), 1.0F);
      const int64_t before = backend->expert_counts().slots;
      for (int64_t rank = 0; rank < kRanks; ++rank) {
        auto part =
            backend->prepare_experts(share_of(request, {.rank = rank, .ranks = kRanks})).value();
        const std::vector<float> y = run(*part, x, rows, kShape.hidden);
        std::ranges::transform(y, sum, sum.begin(), [](float a, float b) { return a - 1.0F + b; });
      }
      EXPECT_EQ(backend->expert_counts().slots - before, rows * kShape.top_k);
      EXPECT_LT(relative_error(sum, expected), rows >= 400 ? 1e-2 : 1e-5);
    }
  }
}

// But in blocks of two precisions (expert_blocks_test.cc).
TEST(CudaExperts, RowsOfTheirOwnFormAreRefused) {
  NIBBLE_NEEDS_GPU();
  const auto gpu = make_cuda_backend({}).value();
  for (const char* name : {"w8a8_int8", "w4a8_bf16"}) {
    const QuantScheme scheme = find_scheme(name).value();
    RandomExperts layer(scheme, {4, 2, 128, 128}, DType::kBF16);
    layer.mix_down_acts(scheme);
    const Status refused = gpu->prepare_experts(layer.request(8)).status();
    EXPECT_EQ(refused.code(), StatusCode::kUnsupported) << name;
    EXPECT_NE(refused.message().find("--device cpu"), std::string::npos) << refused.message();
  }
}

// With and without biases, by either activation: sums are exact and every rounding is the same.
TEST(CudaExperts, OfInt8ActivationsAreTheCpus) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kRows = 100;
  const auto gpu = make_cuda_backend({}).value();
  const auto cpu = make_cpu_backend({.threads = 2}).value();
  for (const char* name : {"w8a8_int8", "w4a8"}) {
    for (const auto kind : {GemmInput::Kind::kSiluMul, GemmInput::Kind::kClampedSwiglu}) {
      for (const bool biased : {false, true}) {
        RandomExperts layer(find_scheme(name).value(), {8, 2, 192, 192}, DType::kBF16);
        layer.weights.form.activation = kind;
        layer.weights.form.limit = 7.0F;
        if (biased) {
          layer.add_biases();
        }
        const auto x = to_bf16(random_values(static_cast<size_t>(kRows * 192), 11, 1.0F));
        auto on_gpu = gpu->prepare_experts(layer.request(kRows));
        auto on_cpu = cpu->prepare_experts(layer.request(kRows));
        ASSERT_TRUE(on_gpu.ok() && on_cpu.ok());
        const std::vector<float> expected = run_on_cpu(**on_cpu, x, kRows, 192);
        const double error = relative_error(run(**on_gpu, x, kRows, 192), expected);
        EXPECT_LE(error, 1e-6) << name << " activation " << static_cast<int>(kind) << " bias "
                               << biased;
      }
    }
  }
}

/// Rows that each choose the experts of a list: sums of these experts' rows of the router.
std::vector<uint16_t> choosing(const ReferenceExperts& weights,
                               const std::vector<std::vector<int64_t>>& chosen) {
  const auto hidden = static_cast<size_t>(weights.router.k);
  std::vector<float> x(chosen.size() * hidden);
  std::vector<float> of_expert(hidden);
  for (size_t row = 0; row < chosen.size(); ++row) {
    for (const int64_t expert : chosen[row]) {
      decode_row(weights.router, expert, of_expert.data());
      for (size_t i = 0; i < hidden; ++i) {
        x[row * hidden + i] += of_expert[i];
      }
    }
  }
  return to_bf16(x);
}

// By one warp for few rows and by a block for many.
TEST(CudaExperts, CountWhatRowsChoose) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  EXPECT_EQ(backend->expert_counts(), ExpertCounts());
  RandomExperts layer(find_scheme("bf16").value(), {40, 2, 256, 128}, DType::kBF16);
  auto experts = backend->prepare_experts(layer.request(60)).value();
  EXPECT_EQ(backend->expert_counts(), ExpertCounts());
  run(*experts, choosing(layer.weights, {{3, 39}, {39, 7}, {39, 3}}), 3, 256);
  ExpertCounts expected{.runs = 1, .active = 3, .slots = 6, .rows_max = 3};
  EXPECT_EQ(backend->expert_counts(), expected);
  std::vector<std::vector<int64_t>> chosen(60, {0, 31});
  chosen[50] = {32, 31};
  run(*experts, choosing(layer.weights, chosen), 60, 256);
  expected += {.runs = 1, .active = 3, .slots = 120, .rows_max = 60};
  EXPECT_EQ(backend->expert_counts(), expected);
}

/// Schemes of each kind of kernel.
constexpr const char* kKinds[] = {"bf16",       "w8a16_channel", "w4a16_channel",  "w4a16_g32",
                                  "w4a16_g128", "mxfp4",         "mxfp4_fp8",      "w4a8",
                                  "w8a8_int8",  "w8a8_fp8",      "w8a8_fp8_block", "w4ax",
                                  "w4ax_b32",   "w4ax_class"};
constexpr ExpertsShape kManyExperts{40, 2, 256, 128};

/// Row r of `rows` chooses two of `count` experts from `first` on.
std::vector<std::vector<int64_t>> spread(int64_t rows, int64_t first, int64_t count) {
  std::vector<std::vector<int64_t>> chosen;
  for (int64_t row = 0; row < rows; ++row) {
    chosen.push_back({first + 2 * row % count, first + (2 * row + 1) % count});
  }
  return chosen;
}

/// y [m, hidden] of rows that held 1, by an earlier record of the work: of nothing but m.
class RecordedRun {
 public:
  RecordedRun(Backend& backend, PreparedExperts& experts, int64_t m, int64_t hidden)
      : experts_(experts),
        m_(m),
        hidden_(hidden),
        stream_(stream_of(backend)),
        recorder_(stream_),
        x_(static_cast<size_t>(m * hidden)),
        y_(static_cast<size_t>(m * hidden)) {}

  std::vector<float> run(const std::vector<uint16_t>& x) {
    const std::vector<float> ones(x.size(), 1.0F);
    EXPECT_TRUE(copy_to_device(x_.data(), x.data(), x.size() * sizeof(x[0])).ok());
    EXPECT_TRUE(copy_to_device(y_.data(), ones.data(), ones.size() * sizeof(ones[0])).ok());
    const auto issue = [this] {
      ++issued_;
      experts_.run({.x = {x_.data(), DType::kBF16},
                    .x_stride = hidden_,
                    .m = m_,
                    .y = y_.data(),
                    .y_stride = hidden_});
    };
    EXPECT_TRUE(recorder_.run(0, m_, issue).ok());
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return y_.host();
  }
  [[nodiscard]] int issued() const { return issued_; }

 private:
  PreparedExperts& experts_;
  int64_t m_;
  int64_t hidden_;
  cudaStream_t stream_;
  StepRecorder recorder_;
  DeviceArray<uint16_t> x_;
  DeviceArray<float> y_;
  int issued_ = 0;
};

// What is recorded with few active experts is right with all of them, and the other way round.
TEST(CudaExperts, RecordedRunsServeAnyRouting) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  const int64_t hidden = kManyExperts.hidden;
  for (const char* name : kKinds) {
    RandomExperts layer(find_scheme(name).value(), kManyExperts, DType::kBF16);
    for (const int64_t m : testing::row_counts({1, 4, 20, 64, 150}, {20})) {
      SCOPED_TRACE(::testing::Message() << name << ", m = " << m);
      auto experts = backend->prepare_experts(layer.request(m)).value();
      RecordedRun recorded(*backend, *experts, m, hidden);
      for (const auto& chosen :
           {spread(m, 3, 2), spread(m, 0, 40), spread(m, 38, 2), spread(m, 7, 5)}) {
        const ExpertCounts before = backend->expert_counts();
        const auto x = choosing(layer.weights, chosen);
        EXPECT_LT(relative_error(recorded.run(x), expected_of(layer.weights, x, m)), 1e-2);
        std::set<int64_t> active;
        for (const auto& of_row : chosen) {
          active.insert(of_row.begin(), of_row.end());
        }
        EXPECT_EQ((backend->expert_counts() - before).active, std::ssize(active));
      }
      EXPECT_EQ(recorded.issued(), 1);
    }
  }
}

// Of results beside the oracle's: sums of FP8 are cut at 14 bits.
double tolerance_of(const QuantScheme& scheme) {
  return scheme.act == ActFormat::kFp8Token ? 3e-2 : 1e-2;
}

// All rows to the same experts, none to most, one to the last.
TEST(CudaExperts, TakeAnyRouting) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  constexpr int64_t kMost = 300;
  for (const char* name : kKinds) {
    const QuantScheme scheme = find_scheme(name).value();
    RandomExperts layer(scheme, kManyExperts, DType::kBF16);
    auto experts = backend->prepare_experts(layer.request(kMost)).value();
    for (const int64_t m : testing::row_counts({1, 5, 65, kMost}, {65})) {
      auto one_to_the_last = spread(m, 0, 2);
      one_to_the_last.back() = {39, 1};
      for (const auto& chosen :
           {spread(m, 0, 2), spread(m, 38, 2), spread(m, 10, 3), one_to_the_last}) {
        SCOPED_TRACE(::testing::Message() << name << ", m = " << m << ", " << chosen.back()[0]);
        const auto x = choosing(layer.weights, chosen);
        EXPECT_LT(relative_error(run(*experts, x, m, kManyExperts.hidden),
                                 expected_of(layer.weights, x, m)),
                  tolerance_of(scheme));
      }
    }
  }
}

/// Of `rows`, the first `count` choose expert 3 and one of six others, the rest two of these; none
/// chooses expert 7.
std::vector<std::vector<int64_t>> with_count(int64_t rows, int64_t count) {
  constexpr int64_t kOthers[] = {0, 6, 1, 5, 2, 4};
  std::vector<std::vector<int64_t>> chosen;
  for (int64_t row = 0; row < rows; ++row) {
    chosen.push_back({row < count ? 3 : kOthers[row % 6], kOthers[(row + 1) % 6]});
  }
  return chosen;
}

// An expert with as many rows as the tiles of each class hold, or one more or less, beside experts
// of fewer rows and none. Sums of integers are the same in larger steps, whose tiles are others.
TEST(CudaExperts, TakeRowsAtTheBordersOfTiles) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  constexpr ExpertsShape kShape{8, 2, 128, 128};
  constexpr int64_t kMost = 800;
  for (const char* name : {"mxfp4", "w4a8", "w8a8_fp8", "w4ax_b64"}) {
    const QuantScheme scheme = find_scheme(name).value();
    RandomExperts layer(scheme, kShape, DType::kBF16);
    auto experts = backend->prepare_experts(layer.request(kMost)).value();
    const auto check = [&](int64_t m, int64_t count) {
      SCOPED_TRACE(::testing::Message() << name << ", m = " << m << ", " << count);
      const auto x = choosing(layer.weights, with_count(m, count));
      const std::vector<float> got = run(*experts, x, m, kShape.hidden);
      EXPECT_LT(relative_error(got, expected_of(layer.weights, x, m)), tolerance_of(scheme));
      if (is_integer(scheme.act)) {
        const auto more = choosing(layer.weights, with_count(kMost, count));
        const std::vector<float> of_more = run(*experts, more, kMost, kShape.hidden);
        EXPECT_TRUE(std::equal(got.begin(), got.end(), of_more.begin()));
      }
    };
    for (const int64_t count :
         testing::row_counts({8, 9, 16, 17, 31, 32, 33, 64, 65, 97, 129}, {17})) {
      check(count + 3, count);
    }
    check(540, 257);
    check(kMost, 193);
    check(kMost, kMost);
  }
}

// A row that is NaN, in part or in whole, spoils itself alone and is counted like any other.
TEST(CudaExperts, NanRowsSpoilNoOthers) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  const int64_t hidden = kManyExperts.hidden;
  constexpr int64_t kMost = 70;
  constexpr uint16_t kNan = 0x7fc0;
  for (const char* name : kKinds) {
    const QuantScheme scheme = find_scheme(name).value();
    RandomExperts layer(scheme, kManyExperts, DType::kBF16);
    auto experts = backend->prepare_experts(layer.request(kMost)).value();
    for (const int64_t m : testing::row_counts({2, 4, 20, kMost}, {20})) {
      SCOPED_TRACE(::testing::Message() << name << ", m = " << m);
      // Those of NaN rows go where others are: to the first experts.
      auto x = choosing(layer.weights, spread(m, 0, 6));
      const std::vector<float> expected = expected_of(layer.weights, x, m);
      const std::vector<int64_t> spoiled = {0, m - 1};
      x[5] = kNan;
      std::fill(x.end() - hidden, x.end(), kNan);
      const ExpertCounts before = backend->expert_counts();
      std::vector<float> got = run(*experts, x, m, hidden);
      const ExpertCounts counts = backend->expert_counts() - before;
      EXPECT_EQ(counts.slots, 2 * m);
      EXPECT_LE(counts.active, 6);
      for (const int64_t row : spoiled) {
        const auto of_row = got.begin() + row * hidden;
        EXPECT_TRUE(std::all_of(of_row, of_row + hidden, [](float y) { return std::isnan(y); }));
        std::copy_n(expected.begin() + row * hidden, hidden, of_row);
      }
      EXPECT_TRUE(m <= 2 || relative_error(got, expected) < tolerance_of(scheme));
      // Nothing of them stays behind.
      const auto again = choosing(layer.weights, spread(m, 0, 6));
      EXPECT_LT(relative_error(run(*experts, again, m, hidden), expected), tolerance_of(scheme));
    }
  }
}

constexpr const char* kOfAllExperts[] = {"experts_cublaslt_rebuilt", "experts_cublaslt_cached",
                                         "experts_cublaslt_strided"};

// Where there are scales, results of gate and up are rounded to BF16 before they are scaled, too.
// That takes some activations to the next E4M3 number, 6 to 12 % away: 1.7 % of the results, as a
// simulation of both roundings in NumPy says for random weights of these sizes.
constexpr double kRoundedTwice = 3e-2;

TEST(CudaExperts, ThatAreAllComputedEqualTheReference) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kRows = 300;  // more than one part
  constexpr ExpertsShape kShape{6, 2, 256, 128};
  for (const char* kernel : kOfAllExperts) {
    const auto backend = make_cuda_backend({.kernels = {kernel}}).value();
    for (const char* name : {"bf16", "w8a8_fp8", "w8a8_fp8_expert"}) {
      for (const GemmInput::Kind activation :
           {GemmInput::Kind::kSiluMul, GemmInput::Kind::kClampedSwiglu}) {
        SCOPED_TRACE(::testing::Message() << kernel << ", " << name);
        const QuantScheme scheme = find_scheme(name).value();
        const double tolerance = scheme.act == ActFormat::kFp8Token ? kRoundedTwice : 1e-2;
        RandomExperts layer(scheme, kShape, DType::kBF16);
        layer.weights.form.activation = activation;
        if (activation == GemmInput::Kind::kClampedSwiglu) {
          layer.add_biases();
          layer.weights.form.limit = 7.0F;
          layer.weights.form.router.scores = RouterScores::kSoftmaxOfChosen;
        }
        const auto x = to_bf16(random_values(static_cast<size_t>(kRows * kShape.hidden), 7, 1.0F));
        const std::vector<float> expected = expected_of(layer.weights, x, kRows);
        auto experts = backend->prepare_experts(layer.request(kRows));
        ASSERT_TRUE(experts.ok()) << experts.status().message();
        EXPECT_EQ((*experts)->kernel_name(), kernel);
        EXPECT_EQ((*experts)->recordable(), kernel != std::string(kOfAllExperts[0]));
        EXPECT_EQ((*experts)->active_bytes(2), (*experts)->active_bytes(6));
        for (const int64_t m : testing::row_counts({1, 3, 17, 90, kRows}, {17})) {
          const std::vector<float> got = run(**experts, x, m, kShape.hidden);
          const std::vector<float> first(expected.begin(), expected.begin() + m * kShape.hidden);
          EXPECT_LT(relative_error(got, first), tolerance) << "m = " << m;
        }
      }
    }
  }
}

TEST(CudaExperts, ThatAreAllComputedAreUnpackedAndReplaced) {
  NIBBLE_NEEDS_GPU();
  for (const char* name : {"bf16", "w8a8_fp8"}) {
    const auto backend = make_cuda_backend({.kernels = {kOfAllExperts[2]}}).value();
    const QuantScheme scheme = find_scheme(name).value();
    RandomExperts layer(scheme, {4, 2, 128, 64}, DType::kBF16);
    auto experts = backend->prepare_experts(layer.request(8)).value();
    layer.weights.gate_up[2] = random_weight(scheme.weight, {128, 128}, 99).value();
    ASSERT_TRUE(experts->update(2, ExpertPart::kGateUp, 0, layer.weights.gate_up[2]).ok());
    for (size_t e = 0; e < 4; ++e) {
      const QuantTensor got = experts->unpack(static_cast<int64_t>(e), ExpertPart::kGateUp).value();
      const QuantTensor& given = layer.weights.gate_up[e];
      EXPECT_TRUE(std::ranges::equal(got.codes.as<uint8_t>(), given.codes.as<uint8_t>())) << e;
      EXPECT_TRUE(std::ranges::equal(got.scales.as<float>(), given.scales.as<float>())) << e;
    }
    const auto x = to_bf16(random_values(8 * 128, 6, 1.0F));
    EXPECT_LT(relative_error(run(*experts, x, 8, 128), expected_of(layer.weights, x, 8)),
              kRoundedTwice);
  }
}

/// Kernels of all experts take neither other schemes nor dense products, and nothing unasked.
TEST(CudaExperts, AreAllComputedOnlyWhereAskedFor) {
  NIBBLE_NEEDS_GPU();
  RandomExperts small(find_scheme("bf16").value(), {4, 2, 136, 72}, DType::kBF16);
  const auto usual = make_cuda_backend({}).value();
  if (const auto experts = usual->prepare_experts(small.request(8)); experts.ok()) {
    EXPECT_FALSE((*experts)->kernel_name().starts_with("experts_cublaslt"));
  }
  for (const char* kernel : kOfAllExperts) {
    const auto backend = make_cuda_backend({.kernels = {kernel}}).value();
    EXPECT_TRUE(backend->prepare_experts(small.request(8)).ok());
    const auto others = make_cuda_backend({.kernels = {kernel}}).value();
    RandomExperts layer(find_scheme("w4a16_g32").value(), {4, 2, 128, 64}, DType::kBF16);
    const auto experts = others->prepare_experts(layer.request(8)).value();
    EXPECT_NE(experts->kernel_name(), kernel);
    const QuantTensor dense =
        random_weight(find_scheme("bf16").value().weight, {128, 128}, 1).value();
    const QuantView views[] = {view_of(dense)};
    const auto gemm = others->prepare_gemm(views, ActFormat::kBf16, 8).value();
    EXPECT_NE(gemm->kernel_name(), kernel);
    const Status refused = others->prepare_steps({.rows = 8, .sequences = 8, .positions = 64});
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.message().find(kernel), std::string::npos);
    EXPECT_NE(refused.message().find("w8a8_fp8"), std::string::npos);
  }
}

TEST(CudaExperts, AreUnpackedAndReplacedOneByOne) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  RandomExperts layer(scheme, {4, 2, 128, 64}, DType::kBF16);
  auto experts = backend->prepare_experts(layer.request(8)).value();
  for (int64_t e = 0; e < 4; ++e) {
    const QuantTensor got = experts->unpack(e, ExpertPart::kDown).value();
    const QuantTensor& given = layer.weights.down[static_cast<size_t>(e)];
    EXPECT_TRUE(std::ranges::equal(got.codes.as<uint8_t>(), given.codes.as<uint8_t>()));
  }
  layer.weights.gate_up[2] = random_weight(scheme.weight, {128, 128}, 99).value();
  ASSERT_TRUE(experts->update(2, ExpertPart::kGateUp, 0, layer.weights.gate_up[2]).ok());
  const auto x = to_bf16(random_values(8 * 128, 6, 1.0F));
  EXPECT_LT(relative_error(run(*experts, x, 8, 128), expected_of(layer.weights, x, 8)), 1e-2);
  EXPECT_EQ(experts->update(4, ExpertPart::kDown, 0, layer.weights.down[3]).code(),
            StatusCode::kInvalidArgument);
}

// 144 MiB of gate and up: more than are on their way to the GPU at once.
TEST(CudaExperts, OfAnyNumberArePacked) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kExperts = 48;
  const auto backend = make_cuda_backend({}).value();
  RandomExperts layer(find_scheme("bf16").value(), {kExperts, 2, 1024, 768}, DType::kBF16);
  auto experts = backend->prepare_experts(layer.request(1)).value();
  const auto expect_as_given = [&](int64_t expert) {
    const auto at = static_cast<size_t>(expert);
    const QuantTensor gate_up = experts->unpack(expert, ExpertPart::kGateUp).value();
    const QuantTensor down = experts->unpack(expert, ExpertPart::kDown).value();
    EXPECT_TRUE(std::ranges::equal(gate_up.codes.as<uint8_t>(),
                                   layer.weights.gate_up[at].codes.as<uint8_t>()))
        << expert;
    EXPECT_TRUE(
        std::ranges::equal(down.codes.as<uint8_t>(), layer.weights.down[at].codes.as<uint8_t>()))
        << expert;
  };
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    expect_as_given(expert);
  }
  const WeightFormat format = find_scheme("bf16").value().weight;
  layer.weights.down[20] = random_weight(format, {1024, 768}, 99).value();
  ASSERT_TRUE(experts->update(20, ExpertPart::kDown, 0, layer.weights.down[20]).ok());
  for (const int64_t expert : {19, 20, 21}) {  // and its neighbours stay
    expect_as_given(expert);
  }
}

TEST(CudaExperts, WithoutKernelsAreRefused) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  RandomExperts layer(find_scheme("w4a8").value(), {4, 2, 128, 96}, DType::kBF16);
  const Status refused = backend->prepare_experts(layer.request(8)).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_NE(refused.message().find("--device cpu"), std::string::npos);
}

}  // namespace
}  // namespace nibble::cuda
