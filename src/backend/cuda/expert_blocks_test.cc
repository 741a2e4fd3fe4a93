// Experts on the GPU whose rows are in blocks of 4 and 8 bits, beside the CPU's.

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/step_recorder.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/cuda/testing/run_experts.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_experts.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;
using testing::run;
using testing::run_on_cpu;

// Products are the same; the weights of their sum are powers of e of logits of 20 and more, whose
// sums have another order.
constexpr double kOfRouters = 4e-6;

struct Case {
  const char* scheme;
  ExpertsShape shape;
};
// Widths of whole and of odd blocks of 128.
const Case kCases[] = {
    {"w4ax", {8, 2, 256, 128}},      {"w4ax", {20, 3, 384, 640}},
    {"w4ax_b64", {8, 2, 192, 64}},   {"w4ax_b64", {6, 6, 320, 192}},
    {"w4ax_b32", {8, 2, 192, 64}},   {"w4ax_b32", {12, 3, 160, 96}},
    {"w4ax_class", {8, 2, 192, 64}}, {"w4ax_class", {20, 3, 448, 320}},
};

/// What a layer has besides.
struct Extras {
  bool biases = false;
  bool own_downs = false;  // rows of each down in an order and blocks of its own
  bool one = false;        // expert for each row, whose weight is 1
  GemmInput::Kind activation = GemmInput::Kind::kSiluMul;
};

RandomExperts layer_of(const Case& each, const Extras& extras) {
  const QuantScheme scheme = find_scheme(each.scheme).value();
  ExpertsShape shape = each.shape;
  shape.top_k = extras.one ? 1 : shape.top_k;
  RandomExperts layer(scheme, shape, DType::kBF16);
  layer.weights.form.router.renormalise = extras.one;
  layer.weights.form.activation = extras.activation;
  layer.weights.form.limit = 7.0F;
  if (extras.biases) {
    layer.add_biases();
  }
  if (extras.own_downs) {
    layer.mix_down_acts(scheme);
  }
  return layer;
}

// Where a row has one expert, bit for bit.
TEST(ExpertBlocks, AreTheCpus) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kMost = 400;
  const auto gpu = make_cuda_backend({}).value();
  const auto cpu = make_cpu_backend({.threads = 2}).value();
  for (const Case& each : kCases) {
    for (const Extras& extras : {Extras{}, Extras{.one = true}, Extras{.biases = true, .one = true},
                                 Extras{.own_downs = true, .one = true},
                                 Extras{true, true, false, GemmInput::Kind::kClampedSwiglu},
                                 Extras{true, true, true, GemmInput::Kind::kClampedSwiglu}}) {
      SCOPED_TRACE(::testing::Message()
                   << each.scheme << " hidden " << each.shape.hidden << " width "
                   << each.shape.width << (extras.biases ? ", biases" : "")
                   << (extras.own_downs ? ", downs of their own" : "")
                   << (extras.one ? ", one for each row" : ""));
      RandomExperts layer = layer_of(each, extras);
      const int64_t hidden = each.shape.hidden;
      const auto x = to_bf16(random_values(static_cast<size_t>(kMost * hidden), 11, 1.0F));
      const auto on_gpu = gpu->prepare_experts(layer.request(kMost));
      ASSERT_TRUE(on_gpu.ok()) << on_gpu.status().message();
      const bool one_scale = !find_scheme(each.scheme).value().weight.grouped();
      EXPECT_TRUE((*on_gpu)->kernel_name().starts_with(one_scale ? "gemm_w4a8_" : "experts_w4ax"))
          << (*on_gpu)->kernel_name();
      const auto on_cpu = cpu->prepare_experts(layer.request(kMost));
      ASSERT_TRUE(on_cpu.ok()) << on_cpu.status().message();
      const std::vector<float> all = run(**on_gpu, x, kMost, hidden);
      for (const int64_t m : testing::row_counts({1, 3, 17, 40, 150, kMost}, {3})) {
        const std::vector<float> got = run(**on_gpu, x, m, hidden);
        const std::vector<float> expected = run_on_cpu(**on_cpu, x, m, hidden);
        EXPECT_LE(relative_error(got, expected), extras.one ? 0.0 : kOfRouters) << m << " rows";
        EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin())) << m << " rows";
      }
    }
  }
}

// Gate and up in one scheme and down in another: either side may be the one with blocks.
TEST(ExpertBlocks, MeetOtherSchemes) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kRows = 90;
  constexpr ExpertsShape kShape{8, 2, 256, 128};
  const auto gpu = make_cuda_backend({}).value();
  const auto cpu = make_cpu_backend({.threads = 2}).value();
  const auto x = to_bf16(random_values(static_cast<size_t>(kRows * kShape.hidden), 12, 1.0F));
  for (const auto& [first, second] : {std::pair("w4ax_b32", "w4a8"), std::pair("w8a8_int8", "w4ax"),
                                      std::pair("w4ax_class", "w4ax_b64")}) {
    SCOPED_TRACE(::testing::Message() << first << " and " << second);
    RandomExperts layer(find_scheme(first).value(), kShape, DType::kBF16);
    const RandomExperts other(find_scheme(second).value(), kShape, DType::kBF16);
    layer.weights.form.down_act = other.weights.form.down_act;
    layer.weights.down.clear();
    for (const QuantTensor& down : other.weights.down) {
      layer.weights.down.push_back(copy_of(view_of(down)).value());
    }
    const auto on_gpu = gpu->prepare_experts(layer.request(kRows));
    ASSERT_TRUE(on_gpu.ok()) << on_gpu.status().message();
    const auto on_cpu = cpu->prepare_experts(layer.request(kRows)).value();
    EXPECT_LE(relative_error(run(**on_gpu, x, kRows, kShape.hidden),
                             run_on_cpu(*on_cpu, x, kRows, kShape.hidden)),
              kOfRouters);
  }
}

// A record of a step is right for rows that choose other experts, of whose forms it knew nothing.
TEST(ExpertBlocks, OfTheirOwnFormAreRecorded) {
  NIBBLE_NEEDS_GPU();
  const auto gpu = make_cuda_backend({}).value();
  const auto cpu = make_cpu_backend({.threads = 2}).value();
  for (const Case& each : {kCases[1], kCases[5], kCases[7]}) {
    RandomExperts layer = layer_of(each, {.biases = true, .own_downs = true});
    const int64_t hidden = each.shape.hidden;
    for (const int64_t m : testing::row_counts({1, 7, 64}, {7})) {
      SCOPED_TRACE(::testing::Message() << each.scheme << ", " << m << " rows");
      const auto on_gpu = gpu->prepare_experts(layer.request(m)).value();
      const auto on_cpu = cpu->prepare_experts(layer.request(m)).value();
      const cudaStream_t stream = stream_of(*gpu);
      StepRecorder recorder(stream);
      const auto count = static_cast<size_t>(m * hidden);
      const DeviceArray<uint16_t> x(count);
      const DeviceArray<float> y(count);
      for (const uint32_t seed : {21U, 22U, 23U}) {
        const auto rows = to_bf16(random_values(count, seed, 1.0F));
        const std::vector<float> ones(count, 1.0F);
        ASSERT_TRUE(copy_to_device(x.data(), rows.data(), count * sizeof(rows[0])).ok());
        ASSERT_TRUE(copy_to_device(y.data(), ones.data(), count * sizeof(ones[0])).ok());
        const auto issue = [&] {
          on_gpu->run({.x = {x.data(), DType::kBF16},
                       .x_stride = hidden,
                       .m = m,
                       .y = y.data(),
                       .y_stride = hidden});
        };
        ASSERT_TRUE(recorder.run(0, m, issue).ok());
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_LE(relative_error(y.host(), run_on_cpu(*on_cpu, rows, m, hidden)), kOfRouters);
      }
    }
  }
}

// As one of several devices has them, with the forms of its own experts.
TEST(ExpertBlocks, OfSharesAddUp) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kRanks = 4, kRows = 40;
  const auto gpu = make_cuda_backend({}).value();
  for (const Case& each : {kCases[1], kCases[7]}) {
    SCOPED_TRACE(each.scheme);
    RandomExperts layer = layer_of(each, {.biases = true, .own_downs = true});
    const ExpertsRequest request = layer.request(kRows);
    const int64_t hidden = each.shape.hidden;
    const auto x = to_bf16(random_values(static_cast<size_t>(kRows * hidden), 13, 1.0F));
    auto whole = gpu->prepare_experts(request).value();
    const std::vector<float> expected = run(*whole, x, kRows, hidden);
    std::vector<float> sum(expected.size(), 1.0F);
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      auto part = gpu->prepare_experts(share_of(request, {.rank = rank, .ranks = kRanks})).value();
      const std::vector<float> y = run(*part, x, kRows, hidden);
      std::ranges::transform(y, sum, sum.begin(), [](float a, float b) { return a - 1.0F + b; });
    }
    EXPECT_LT(relative_error(sum, expected), 1e-5);
  }
}

TEST(ExpertBlocks, OfAnotherWidthAreRefused) {
  NIBBLE_NEEDS_GPU();
  const auto gpu = make_cuda_backend({}).value();
  RandomExperts layer = layer_of(kCases[0], {.own_downs = true});
  layer.weights.form.down_acts[3] = random_blocks(find_scheme("w4ax").value(), 256, 1);
  EXPECT_EQ(gpu->prepare_experts(layer.request(8)).status().code(), StatusCode::kInvalidArgument);
  layer.weights.form.down_acts[3].blocks = nullptr;
  EXPECT_EQ(gpu->prepare_experts(layer.request(8)).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble::cuda
