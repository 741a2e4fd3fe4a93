#include "backend/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {

Result<TensorMaps> TensorMaps::find() {
  TensorMaps maps;
  cudaDriverEntryPointQueryResult found{};
  NIBBLE_RETURN_IF_ERROR(
      check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &maps.encode_, 12000,
                                             cudaEnableDefault, &found),
            "asking the driver for tensor maps"));
  if (found != cudaDriverEntryPointSuccess) {
    return make_error(StatusCode::kUnavailable,
                      "the driver has no cuTensorMapEncodeTiled; install a driver for CUDA 13");
  }
  return maps;
}

bool TensorMaps::map_bf16(const void* x,
                          int64_t rows,
                          int64_t columns,
                          int box_rows,
                          int panels,
                          CUtensorMap& map) const {
  const cuuint64_t sizes[3] = {64, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(columns / 64)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns) * 2, 128};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(panels)};
  const cuuint32_t ones[3] = {1, 1, 1};
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encode_);
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(x), sizes, strides,
                box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace nibble::cuda
