#include "backend/cuda/cuda_heads.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/few_heads.h"
#include "backend/cuda/memory.h"
#include "base/check.h"
#include "base/f16.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kAligned = 8;  // numbers of BF16 in what cuBLASLt is told operands begin at

}  // namespace

bool CudaHeads::takes(std::span<const QuantView> heads) {
  return std::ranges::all_of(heads, [&](const QuantView& head) {
    const WeightCode code = head.format.code;
    return (code == WeightCode::kBf16 || code == WeightCode::kF32) && head.n == heads.front().n &&
           head.k == heads.front().k && head.n % kAligned == 0 && head.k % kAligned == 0;
  });
}

Result<std::unique_ptr<PreparedHeads>> CudaHeads::create(std::span<const QuantView> heads,
                                                         const GemmContext& context) {
  NIBBLE_ASSIGN_OR_RETURN(std::shared_ptr<CublasLt> library, CublasLt::open(context.device));
  std::unique_ptr<CudaHeads> out(new CudaHeads(heads, std::move(library), context.stream));
  const auto row = static_cast<size_t>(out->k_);
  const size_t bytes = heads.size() * static_cast<size_t>(out->n_) * row * 2;
  NIBBLE_ASSIGN_OR_RETURN(out->weights_, allocate_device(bytes, "the heads of latent attention"));
  // Whole rows at once: the host's copy is gone when this returns.
  std::vector<uint16_t> rounded(bytes / 2);
  for (size_t i = 0; i < heads.size() * static_cast<size_t>(out->n_); ++i) {
    const QuantView& head = heads[i / static_cast<size_t>(out->n_)];
    const std::byte* from = head.code_row(static_cast<int64_t>(i) % out->n_);
    uint16_t* const to = rounded.data() + i * row;
    if (head.format.code == WeightCode::kBf16) {
      std::copy_n(reinterpret_cast<const uint16_t*>(from), row, to);
    } else {
      std::transform(reinterpret_cast<const float*>(from),
                     reinterpret_cast<const float*>(from) + row, to, f32_to_bf16);
    }
  }
  NIBBLE_RETURN_IF_ERROR(context.uploader.upload(reinterpret_cast<const std::byte*>(rounded.data()),
                                                 bytes, out->weights_.as<void>()));
  return std::unique_ptr<PreparedHeads>(std::move(out));
}

void CudaHeads::run(const HeadsArgs& args) {
  const FewHeadsLaunch few{.w = weights_.as<void>(),
                           .x = args.x.data,
                           .y = args.y.data,
                           .x_stride = args.x_stride,
                           .x_head = args.x_head,
                           .y_stride = args.y_stride,
                           .y_head = args.y_head,
                           .heads = static_cast<int32_t>(count_),
                           .m = static_cast<int32_t>(std::min<int64_t>(args.m, kMostFewRows + 1)),
                           .n = static_cast<int32_t>(n_),
                           .k = static_cast<int32_t>(k_)};
  if (are_few_heads(few)) {
    CHECK(args.x.type == DType::kBF16 && args.y.type == DType::kBF16);
    return must(multiply_few_heads(few, {stream_}), "products of heads");
  }
  CublasLtProblem problem{
      .m = args.m,
      .n = n_,
      .k = k_,
      .y_stride = args.y_stride,
      .x_stride = args.x_stride,
      .batch = {.count = count_, .x = args.x_head, .w = n_ * k_, .y = args.y_head}};
  if (args.x_head == 0 && args.y_head == n_) {  // one matrix, as its rows lie
    problem.n = count_ * n_;
    problem.batch = {};
  }
  multiply(problem, args);
}

void CudaHeads::run_transposed(const HeadsArgs& args) {
  multiply({.m = args.m,
            .n = k_,
            .k = n_,
            .y_stride = args.y_stride,
            .x_stride = args.x_stride,
            .w_by_k = true,
            .batch = {.count = count_, .x = args.x_head, .w = n_ * k_, .y = args.y_head}},
           args);
}

void CudaHeads::multiply(const CublasLtProblem& problem, const HeadsArgs& args) {
  CHECK(args.x.type == DType::kBF16 && args.y.type == DType::kBF16);
  if (args.m > 0) {
    must(library_->run_exactly(problem,
                               {.x = args.x.data, .w = weights_.as<void>(), .y = args.y.data},
                               CublasLt::Planning::kKept, stream_));
  }
}

}  // namespace nibble::cuda
