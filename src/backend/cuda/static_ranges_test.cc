// Numbers far outside of int4_static's ranges: what kernels count of them, and what is said.

#include "backend/cuda/static_ranges.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cuda/testing/attention_case.h"
#include "base/f16.h"
#include "ops/attention.h"

namespace nibble::cuda {
namespace {

using testing::AttentionCase;
using testing::DeviceArray;
using ::testing::HasSubstr;
using testing::random_values;

constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kTokens = 150;  // of one sequence
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

AttentionShape shape_of(int head_dim) {
  AttentionShape shape;
  shape.kv = {KvCode::kInt4Static, 64, kKvHeads, head_dim};
  shape.heads = kHeads;
  shape.scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
  return shape;
}

/// A case whose kernels count.
struct CountedCase {
  DeviceBuffer memory = allocate_pinned(sizeof(uint32_t)).value();
  AttentionCase test;

  explicit CountedCase(int head_dim) : test(shape_of(head_dim), {{1, kTokens}}, 11) {
    test.far_outside = memory.as<uint32_t>();
    test.longest = kShortAttention;
  }

  /// Sets a number of a token's key, or value, to one that BF16 has.
  void put(int token, int head, bool value, int d, float x) {
    const int dim = test.shape.kv.head_dim;
    const int row =
        (token * (kHeads + 2 * kKvHeads) + kHeads + (value ? kKvHeads : 0) + head) * dim;
    const uint16_t bits = f32_to_bf16(x);
    test.qkv[static_cast<size_t>(row + d)] = x;
    ASSERT_TRUE(copy_to_device(test.device_qkv->data() + row + d, &bits, sizeof bits).ok());
  }

  /// What run() makes kernels count.
  template <typename Run>
  int64_t count(const Run& run) {
    *memory.as<uint32_t>() = 0;
    run();
    return *memory.as<uint32_t>();
  }

  /// check(numbers counted, first token that was appended) of each way to append.
  template <typename Check>
  void check_all(const Check& check) {
    {
      SCOPED_TRACE("all tokens at once");
      check(count([&] { test.fill_cache(); }), 0);
    }
    {
      SCOPED_TRACE("in steps, each with a row of nobody whose numbers are the next token's");
      check(count([&] { test.append_in_steps({64, 85, 1}); }), 0);
    }
    if (query_device(0).value().hopper() && test.shape.kv.head_dim <= 128) {
      SCOPED_TRACE("in the kernel of attention, beside rows of nobody that are no numbers");
      check(count([&] { test.run_appending({nullptr, false}); }), kTokens - 1);
    }
  }
};

struct FarNumbers {
  int64_t sure = 0;
  int64_t close = 0;  // so close to the border that roundings decide
};

/// Of the tokens from `first` on, by the oracle's keys and values.
FarNumbers far_numbers(const AttentionCase& test, const KvBasis& basis, int first) {
  const int dim = test.shape.kv.head_dim;
  const std::vector<float> inv_freq = test.inv_freq->host();
  std::vector<float> qkv = test.qkv;
  KvView kv{KvCode::kInt4Static, kTokens, kKvHeads, dim, nullptr};
  kv.basis = basis;
  std::vector<std::byte> pages(static_cast<size_t>(kv.page_bytes()));
  kv.pages = pages.data();
  const int32_t table = 0;
  const SequenceSpan span{0, kTokens, kTokens, &table, 0};
  RopeAppendArgs args;
  args.qkv = qkv.data();
  args.stride = (kHeads + 2 * kKvHeads) * dim;
  args.heads = kHeads;
  args.inv_freq = inv_freq.data();
  args.kv = kv;
  args.sequences = {&span, 1};
  reference_rope_append(args);  // leaves in the rows what it codes
  FarNumbers far;
  for (int token = first; token < kTokens; ++token) {
    for (int i = 0; i < 2 * kKvHeads * dim; ++i) {
      const float* steps = i < kKvHeads * dim ? basis.key_step : basis.value_step;
      const double border = 16.0 * steps[i % (kKvHeads * dim)];
      const double x = std::fabs(qkv[static_cast<size_t>(token * args.stride + kHeads * dim + i)]);
      const bool close = std::fabs(x - border) <= 1e-4 * border;
      far.close += close ? 1 : 0;
      far.sure += close || x <= border ? 0 : 1;
    }
  }
  return far;
}

void check_as_the_oracle(int head_dim, HeadForm form) {
  SCOPED_TRACE(fmt::format("{} {}", head_dim, head_form_name(form)));
  CountedCase counted(head_dim);
  for (const int token : {3, 70, kTokens - 1}) {
    counted.put(token, 0, false, 5, 1024.0F);
    counted.put(token, 1, false, 7, kInfinity);
    counted.put(token, 0, true, 1, kNan);
    counted.put(token, 1, true, head_dim - 1, -1024.0F);
  }
  const std::vector<float> means = random_values(static_cast<size_t>(kKvHeads * head_dim), 5, 0.5F);
  const DeviceArray<float> device_means(means);
  KvBasis& device = counted.test.basis;  // has steps
  KvBasis host = device;
  host.key_step = host.value_step = counted.test.steps.data();
  host.turns_keys = host.turns_values = device.turns_keys = device.turns_values = form.turned;
  if (form.centred) {
    host.key_mean = host.value_mean = means.data();
    device.key_mean = device.value_mean = device_means.data();
  }
  counted.check_all([&](int64_t got, int first) {
    const FarNumbers far = far_numbers(counted.test, host, first);
    EXPECT_GE(far.sure, 5);
    EXPECT_LE(far.close, 20);
    EXPECT_GE(got, far.sure);
    EXPECT_LE(got, far.sure + far.close);
  });
}

TEST(StaticRanges, NumbersAreCountedAsTheOracleDoes) {
  NIBBLE_NEEDS_GPU();
  for (const HeadForm form : kHeadForms) {
    for (const int dim : {64, 128, 256}) {
      check_as_the_oracle(dim, form);
    }
  }
}

// Values are not rotated: what is counted is known without any oracle.
TEST(StaticRanges, KnownNumbersAreCounted) {
  NIBBLE_NEEDS_GPU();
  for (const int dim : {64, 128, 256}) {
    SCOPED_TRACE(dim);
    CountedCase counted(dim);
    std::vector<float> steps(static_cast<size_t>(kKvHeads * dim), 8.0F);  // to 128 on each side
    steps[9] = 0.0F;
    const DeviceArray<float> value_steps(steps);
    const DeviceArray<float> key_steps(std::vector<float>(steps.size(), 1e3F));
    counted.test.basis.key_step = key_steps.data();
    counted.test.basis.value_step = value_steps.data();
    for (int token = 0; token < kTokens; ++token) {
      counted.put(token, 0, true, 9, 0.0F);
    }
    const int last = kTokens - 1;
    counted.put(last, 0, true, 9, 0.5F);  // a step of 0 takes zeros alone
    counted.put(last, 0, true, 0, 128.0F);
    counted.put(last, 0, true, 1, -128.0F);
    counted.put(last, 0, true, dim / 2, 129.0F);
    counted.put(last, 0, true, dim - 1, -129.0F);
    counted.put(last, 1, true, 0, kNan);
    counted.put(last, 1, true, 30, kInfinity);
    counted.put(last, 1, true, dim - 2, -kInfinity);
    counted.put(20, 1, true, dim - 1, 0x1p100F);
    counted.check_all([&](int64_t got, int first) { EXPECT_EQ(got, first > 20 ? 6 : 7); });
  }
}

TEST(StaticRanges, EveryNumberIsCounted) {
  NIBBLE_NEEDS_GPU();
  for (const int dim : {64, 128, 256}) {
    for (const float step : {1e3F, 1e-9F}) {  // wide enough for anything, and for nothing
      CountedCase counted(dim);
      const DeviceArray<float> steps(std::vector<float>(static_cast<size_t>(kKvHeads * dim), step));
      counted.test.basis.key_step = counted.test.basis.value_step = steps.data();
      counted.check_all([&](int64_t got, int first) {
        EXPECT_EQ(got, step > 1.0F ? 0 : (kTokens - first) * 2 * kKvHeads * dim);
      });
    }
  }
}

TEST(StaticRanges, WhatWasCountedIsWarnedOf) {
  NIBBLE_NEEDS_GPU();
  const auto said = [](const auto& run) {
    ::testing::internal::CaptureStderr();
    run();
    return ::testing::internal::GetCapturedStderr();
  };
  auto ranges = std::make_unique<StaticRanges>();
  EXPECT_EQ(said([&] { ranges->report(); }), "");  // nobody has asked for the counter
  uint32_t* const counter = ranges->counter().value();
  EXPECT_EQ(ranges->counter().value(), counter);
  EXPECT_EQ(said([&] { ranges->report(); }), "");
  *counter += 3;
  EXPECT_THAT(said([&] { ranges->report(); }), HasSubstr(" 3 keys and values so far"));
  *counter += 6;
  EXPECT_EQ(said([&] { ranges->report(); }), "");
  *counter += 4;
  EXPECT_THAT(said([&] { ranges->report(); }), HasSubstr(" 13 keys and values so far"));
  EXPECT_EQ(said([&] { ranges->report(); }), "");
  *counter += 500;
  EXPECT_EQ(said([&] {
              ranges->forget();
              ranges->report();
            }),
            "");
  *counter += 90;  // of a step whose results nobody asked for
  EXPECT_THAT(said([&] { ranges.reset(); }), HasSubstr(" 103 keys and values so far"));
}

}  // namespace
}  // namespace nibble::cuda
