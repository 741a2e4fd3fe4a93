// libnibble_cuda_faulty.so: the library that the program opens, for a GPU with a fault. The file
// "fault" beside it says which: "none", "damaged" (packed weights), "few" (W4A16 kernels for 9 to
// 16 rows), or "trap N" (a kernel faults before product N). Not installed.

#include <fstream>
#include <string>

#include <dlfcn.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/testing/faulty_gemm.h"

extern "C" {

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
  result = nibble::make_cuda_backend(
      options, nibble::cuda::testing::faulty_gemms(fault == "damaged" ? Fault::kDamagedWeights
                                                   : fault == "few"   ? Fault::kWrongFewRows
                                                   : fault == "trap"  ? Fault::kTrap
                                                                      : Fault::kNone,
                                                   runs));
}

}  // extern "C"
