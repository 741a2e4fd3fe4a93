#include "backend/cuda/cuda_backend.h"

#include "backend/cuda/testing/gpu_test.h"
#include "quant/quant_tensor.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kVocab = 512, kWidth = 256;

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

}  // namespace
}  // namespace nibble::cuda
