#pragma once

#include <cuda_runtime_api.h>

namespace nibble::cuda {

/// Where a kernel goes. With `overlap` it is launched programmatically dependent on its
/// predecessor: it may start while that still runs, so it must call ptx::wait_for_predecessor()
/// before it reads what earlier kernels wrote (weights never change and may be read before) or
/// writes what they read.
struct LaunchContext {
  cudaStream_t stream = nullptr;
  bool overlap = true;
};

struct Grid {
  dim3 blocks = {};
  unsigned threads = 0;     // per block
  size_t shared_bytes = 0;  // dynamic; above 48 KiB the kernel's limit must have been raised
  unsigned cluster = 1;     // neighbouring blocks (in x) that run at the same time
};

/// Launches kernel(args...). Allocates nothing and may be captured in a graph.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...),
                   const Grid& grid,
                   const LaunchContext& context,
                   Arguments... args) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (context.overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {grid.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = context.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...);
}

}  // namespace nibble::cuda
