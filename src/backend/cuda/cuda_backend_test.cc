#include "backend/cuda/cuda_backend.h"

#include "backend/cuda/testing/gpu_test.h"
#include "quant/quant_tensor.h"

namespace nibble::cuda {
namespace {

/// Rows of ones in `code`.
QuantTensor ones(WeightCode code, int64_t n, int64_t k) {
  QuantTensor weight = QuantTensor::allocate({.code = code}, n, k).value();
  std::ranges::fill(weight.codes.as<uint16_t>(), code == WeightCode::kBf16 ? 0x3f80 : 0x3c00);
  return weight;
}

TEST(CudaBackend, ATableThatIsAHeadAsWellIsKeptOnce) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kVocab = 32768, kWidth = 2048, kBytes = kVocab * kWidth * 2;
  for (const WeightCode code : {WeightCode::kBf16, WeightCode::kF16}) {
    const auto backend = make_cuda_backend({}).value();
    const QuantTensor weight = ones(code, kVocab, kWidth), other = ones(code, kVocab, kWidth);
    const auto head = backend->prepare_gemm(weight, ActFormat::kBf16, 8).value();
    const int64_t before = backend->free_memory();
    const auto same = backend->prepare_table(view_of(weight), nullptr).value();
    const int64_t taken = before - backend->free_memory();
    EXPECT_EQ(taken >= kBytes, code != WeightCode::kBf16) << taken;
    const auto another = backend->prepare_table(view_of(other), nullptr).value();
    EXPECT_GE(before - backend->free_memory() - taken, kBytes);
    // Another model's file may come to where the first one's was.
    const auto later = backend->prepare_table(view_of(weight), nullptr).value();
    EXPECT_GE(before - backend->free_memory() - taken, 2 * kBytes);
  }
}

}  // namespace
}  // namespace nibble::cuda
