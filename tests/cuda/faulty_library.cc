// libnibble_cuda_faulty.so: the library that the program opens, for a GPU with a fault. The file
// "fault" beside it says which: "none", "damaged" (packed weights), "few" (W4A16 kernels for 9 to
// 16 rows), "trap N" (a kernel faults before product N), or "graphs N" (no memory for more than N
// CUDA graphs). Not installed.

#include <cstdint>
#include <fstream>
#include <string>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/testing/faulty_gemm.h"

namespace {

uint32_t graphs_left = UINT32_MAX;

}  // namespace

extern "C" {

// The linker puts the second in the place of cudaGraphInstantiate(), which is the first.
// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming)
cudaError_t __real_cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, uint64_t flags);

cudaError_t __wrap_cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, uint64_t flags) {
  if (graphs_left == 0) {
    return cudaErrorMemoryAllocation;
  }
  --graphs_left;
  return __real_cudaGraphInstantiate(out, graph, flags);
}
// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)

extern const int nibble_cuda_interface;
const int nibble_cuda_interface = nibble::kCudaInterface;

void nibble_cuda_make_backend(const nibble::CudaBackendOptions& options,
                              nibble::Result<std::unique_ptr<nibble::Backend>>& result) {
  using nibble::cuda::testing::Fault;
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&nibble_cuda_interface), &self);
  const std::string path = self.dli_fname;
  std::ifstream file(path.substr(0, path.rfind('/') + 1) + "fault");
  std::string fault;
  uint32_t runs = 0;
  file >> fault >> runs;
  graphs_left = fault == "graphs" ? runs : UINT32_MAX;
  result = nibble::make_cuda_backend(
      options, nibble::cuda::testing::faulty_gemms(fault == "damaged" ? Fault::kDamagedWeights
                                                   : fault == "few"   ? Fault::kWrongFewRows
                                                   : fault == "trap"  ? Fault::kTrap
                                                                      : Fault::kNone,
                                                   runs));
}

}  // extern "C"
