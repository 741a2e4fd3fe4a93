#include "backend/cuda/cuda_backend.h"

#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cuda/testing/gpu_test.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble::cuda {
namespace {

// More rows than matrices have that are packed into tiles of their own.
constexpr int64_t kVocab = 16'448, kWidth = 64;

/// A table of one value, 1 or 2.
QuantTensor table_of(WeightCode code, int value) {
  QuantTensor table = QuantTensor::allocate({.code = code}, kVocab, kWidth).value();
  const uint16_t one = code == WeightCode::kBf16 ? 0x3f80 : 0x3c00;
  std::ranges::fill(table.codes.as<uint16_t>(), value == 1 ? one : 0x4000);
  return table;
}

/// What a step gathers for its only token.
float gathered(Backend& backend, const PreparedTable& table) {
  const DeviceBuffer row = backend.allocate(kWidth * sizeof(float)).value();
  const int32_t token = kVocab - 1, page = 0, logit_row = 0;
  const SequenceSpan sequence{.q_begin = 0, .q_len = 1, .kv_len = 1, .pages = &page};
  const StepInput input{
      .tokens = {&token, 1}, .sequences = {&sequence, 1}, .logit_rows = {&logit_row, 1}};
  const StepPlan plan{.input = input,
                      .page_size = backend.preferred_page_size(KvCode::kBf16),
                      .program = backend.new_program()};
  backend.run_step(plan, [&](Step& step) { table.gather(step, row.as<float>()); });
  float value = 0;
  backend.read(row.as<float>(), {&value, 1});
  return value;
}

// New weights of a head show whose memory a table is.
TEST(CudaBackend, ATableThatIsAHeadAsWellIsKeptOnce) {
  NIBBLE_NEEDS_GPU();
  for (const WeightCode code : {WeightCode::kBf16, WeightCode::kF16}) {
    const auto backend = make_cuda_backend({.record_steps = false}).value();
    const QuantTensor weight = table_of(code, 1), other = table_of(code, 1);
    const auto head = backend->prepare_gemm(weight, ActFormat::kBf16, 8).value();
    const auto same = backend->prepare_table(view_of(weight), nullptr).value();
    const auto another = backend->prepare_table(view_of(other), nullptr).value();
    // Another model's file may come to where the first one's was.
    const auto later = backend->prepare_table(view_of(weight), nullptr).value();
    ASSERT_TRUE(backend->prepare_steps({.rows = 1, .sequences = 1, .positions = 64}).ok());
    EXPECT_EQ(gathered(*backend, *same), 1);
    ASSERT_TRUE(head->update(0, table_of(code, 2)).ok());
    EXPECT_EQ(gathered(*backend, *same), code == WeightCode::kBf16 ? 2 : 1);
    EXPECT_EQ(gathered(*backend, *another), 1);
    EXPECT_EQ(gathered(*backend, *later), 1);
  }
}

TEST(CudaBackend, TakesBlocksInBf16OfInt4PerChannelAlone) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  const QuantScheme scheme = find_scheme("w4a8_bf16").value();
  EXPECT_TRUE(backend->check_gemm(scheme.weight, scheme.act, 4096).ok());
  const WeightFormat bytes{WeightCode::kInt8, ScalePer::kChannel};
  const Status refused = backend->check_gemm(bytes, scheme.act, 4096);
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("with INT8 and BF16 activations on"));
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("use --device cpu"));
}

/// Row r of a table, as F32.
QuantTensor table_of_row_numbers(int64_t rows) {
  QuantTensor table = QuantTensor::allocate({.code = WeightCode::kF32}, rows, kWidth).value();
  for (int64_t i = 0; i < rows * kWidth; ++i) {
    table.codes.as<float>()[static_cast<size_t>(i)] = static_cast<float>(i / kWidth);
  }
  return table;
}

// The second step of each size repeats what the first one recorded.
TEST(CudaBackend, PositionsAreThoseOfEachStepInRecordsToo) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  const QuantTensor tokens = table_of(WeightCode::kBf16, 1), places = table_of_row_numbers(70);
  const auto embedding = backend->prepare_table(view_of(tokens), nullptr).value();
  const auto positions = backend->prepare_table(view_of(places), nullptr).value();
  ASSERT_TRUE(backend->prepare_steps({.rows = 8, .sequences = 4, .positions = 64}).ok());
  const DeviceBuffer rows = backend->allocate(8 * kWidth * sizeof(float)).value();
  const int64_t program = backend->new_program();
  const int32_t pages[] = {0, 1, 2, 3};
  const auto step = [&](std::vector<SequenceSpan> sequences) {
    std::vector<int32_t> ids, logit_rows;
    for (SequenceSpan& sequence : sequences) {
      sequence.q_begin = static_cast<int32_t>(ids.size());
      sequence.pages = pages;
      ids.resize(ids.size() + static_cast<size_t>(sequence.q_len), 5);
      logit_rows.push_back(static_cast<int32_t>(ids.size()) - 1);
    }
    const StepPlan plan{.input = {.tokens = ids, .sequences = sequences, .logit_rows = logit_rows},
                        .page_size = backend->preferred_page_size(KvCode::kBf16),
                        .program = program};
    backend->run_step(plan, [&](Step& running) {
      embedding->gather(running, rows.as<float>());
      positions->add_positions(running, 2, rows.as<float>());
    });
    std::vector<float> all(ids.size() * kWidth), firsts;
    backend->read(rows.as<float>(), all);
    for (size_t row = 0; row < ids.size(); ++row) {
      firsts.push_back(all[row * kWidth]);
      EXPECT_EQ(all[row * kWidth + kWidth - 1], firsts.back());
    }
    return firsts;
  };
  using Floats = std::vector<float>;
  for (int32_t round = 0; round < 3; ++round) {  // 1 + 2 + position
    const auto shift = static_cast<float>(round);
    EXPECT_EQ(step({{.q_len = 1, .kv_len = 5 + round}, {.q_len = 1, .kv_len = 60 + round}}),
              (Floats{7 + shift, 62 + shift}));
    EXPECT_EQ(step({{.q_len = 1, .kv_len = 1 + round}}), (Floats{3 + shift}));
    EXPECT_EQ(step({{.q_len = 3, .kv_len = 3 + round}, {.q_len = 1, .kv_len = 9}}),
              (Floats{3 + shift, 4 + shift, 5 + shift, 11}));
  }
}

}  // namespace
}  // namespace nibble::cuda
