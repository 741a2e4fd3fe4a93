#include "bench/cuda/schedules/mixed_data.h"

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"
#include "base/math.h"
#include "bench/cuda/bench_data.h"

namespace nibble::cuda {

Result<MixedData> MixedData::make(const MixedProblem& problem, size_t copies, cudaStream_t stream) {
  MixedData data;
  data.problem_ = problem;
  const auto n = static_cast<size_t>(problem.n), k = static_cast<size_t>(problem.k);
  const auto m = static_cast<size_t>(problem.m), rows = round_up(n, 64);
  const auto int8 = static_cast<size_t>(problem.int8_blocks()) * 128;
  const auto bf16 = static_cast<size_t>(problem.bf16_blocks()) * 128;
  NIBBLE_ASSIGN_OR_RETURN(data.codes_, DeviceMemory::allocate(n * k / 2));
  NIBBLE_ASSIGN_OR_RETURN(data.int8_x_, DeviceMemory::allocate(m * int8));
  NIBBLE_ASSIGN_OR_RETURN(data.bf16_x_, DeviceMemory::allocate(m * bf16 * 2));
  NIBBLE_ASSIGN_OR_RETURN(data.x_scales_, DeviceMemory::allocate(m * 4));
  NIBBLE_ASSIGN_OR_RETURN(data.weight_scales_, DeviceMemory::allocate(rows * 4));
  NIBBLE_ASSIGN_OR_RETURN(data.y_, DeviceMemory::allocate(m * n * 2));
  const auto filled = [](cudaError_t error) { return check(error, "filling operands"); };
  NIBBLE_RETURN_IF_ERROR(
      filled(random_codes(WeightCode::kInt4, data.codes_.as<void>(), n * k / 2, 1, stream)));
  if (int8 > 0) {
    NIBBLE_RETURN_IF_ERROR(filled(
        random_activations(ActFormat::kInt8Token, data.int8_x_.as<void>(), m * int8, 2, stream)));
  }
  if (problem.act_bits == 4) {
    NIBBLE_ASSIGN_OR_RETURN(data.nibbles_x_, DeviceMemory::allocate(m * int8 / 2));
    NIBBLE_RETURN_IF_ERROR(
        filled(narrow_acts(data.int8_x_.as<int8_t>(), data.nibbles_x_.as<uint8_t>(),
                           static_cast<int64_t>(m * int8), stream)));
  }
  if (bf16 > 0) {
    NIBBLE_RETURN_IF_ERROR(
        filled(random_activations(ActFormat::kBf16, data.bf16_x_.as<void>(), m * bf16, 3, stream)));
  }
  NIBBLE_RETURN_IF_ERROR(filled(random_scales(data.x_scales_.as<float>(), m, false, 4, stream)));
  NIBBLE_RETURN_IF_ERROR(
      filled(random_scales(data.weight_scales_.as<float>(), rows, false, 5, stream)));
  NIBBLE_RETURN_IF_ERROR(data.pack(copies, stream));
  return data;
}

Status MixedData::pack(size_t copies, cudaStream_t stream) {
  std::vector<int32_t> blocks[2];  // numbers of the INT8 ones, of the BF16 ones
  for (size_t b = 0; b < problem_.bf16.size(); ++b) {
    blocks[problem_.bf16[b] ? 1 : 0].push_back(static_cast<int32_t>(b));
  }
  DeviceMemory* lists[2] = {&int8_blocks_, &bf16_blocks_};
  for (int i = 0; i < 2; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(*lists[i], DeviceMemory::allocate(blocks[i].size() * 4));
    if (!blocks[i].empty()) {
      NIBBLE_RETURN_IF_ERROR(
          copy_to_device(lists[i]->as<void>(), blocks[i].data(), blocks[i].size() * 4));
    }
  }
  const auto row_blocks = static_cast<size_t>(ceil_div(problem_.n, 64));
  int8_bytes_ = row_blocks * blocks[0].size() * 4096;
  copy_bytes_ = int8_bytes_ + row_blocks * blocks[1].size() * 4096;
  for (const WeightOrder order : {WeightOrder::kInterleaved, WeightOrder::kPlain}) {
    DeviceMemory& packed = packed_[static_cast<int>(order)];
    NIBBLE_ASSIGN_OR_RETURN(packed, DeviceMemory::allocate(copies * copy_bytes_));
    auto* first = packed.as<uint8_t>();
    const MixedPacking packing{.codes = codes_.as<uint8_t>(),
                               .int8_blocks = int8_blocks_.as<int32_t>(),
                               .bf16_blocks = bf16_blocks_.as<int32_t>(),
                               .int8_weights = first,
                               .bf16_weights = first + int8_bytes_,
                               .n = problem_.n,
                               .k = problem_.k,
                               .int8_count = static_cast<int>(blocks[0].size()),
                               .bf16_count = static_cast<int>(blocks[1].size()),
                               .order = order};
    NIBBLE_RETURN_IF_ERROR(check(pack_mixed(packing, stream), "packing weights"));
    for (size_t copy = 1; copy < copies; ++copy) {
      NIBBLE_RETURN_IF_ERROR(check(cudaMemcpyAsync(first + copy * copy_bytes_, first, copy_bytes_,
                                                   cudaMemcpyDeviceToDevice, stream),
                                   "copying weights"));
    }
  }
  return check(cudaStreamSynchronize(stream), "packing weights");
}

MixedOperands MixedData::operands(WeightOrder order, size_t copy) const {
  const auto* weights = packed_[static_cast<int>(order)].as<uint8_t>() + copy * copy_bytes_;
  return {.int8_x = int8_x_.as<void>(),
          .nibbles_x = nibbles_x_.as<void>(),
          .bf16_x = bf16_x_.as<void>(),
          .x_scales = x_scales_.as<float>(),
          .int8_weights = weights,
          .bf16_weights = weights + int8_bytes_,
          .weight_scales = weight_scales_.as<float>(),
          .y = y_.as<void>()};
}

MixedReference MixedData::reference(double* y, double* size) const {
  return {.codes = codes_.as<uint8_t>(),
          .int8_blocks = int8_blocks_.as<int32_t>(),
          .bf16_blocks = bf16_blocks_.as<int32_t>(),
          .int8_x = int8_x_.as<int8_t>(),
          .bf16_x = bf16_x_.as<void>(),
          .weight_scales = weight_scales_.as<float>(),
          .x_scales = x_scales_.as<float>(),
          .y = y,
          .size = size,
          .m = problem_.m,
          .n = problem_.n,
          .k = problem_.k,
          .int8_count = problem_.int8_blocks(),
          .bf16_count = problem_.bf16_blocks()};
}

}  // namespace nibble::cuda
