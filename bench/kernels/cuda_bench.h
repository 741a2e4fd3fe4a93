#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "backend/open_backend.h"
#include "base/json.h"
#include "bench/kernels/kernel_bench.h"

namespace nibble {

/// Version of the interface between the program and libnibble_cuda_bench.so.
inline constexpr int kCudaBenchInterface = 5;

/// Work of a backend that is recorded as a CUDA graph, which is then replayed.
struct CudaReplayWork {
  Backend* backend = nullptr;   // of the GPU of a CudaBench
  std::function<void()> issue;  // calls it, and changes nothing that later calls depend on
  int64_t repeats = 9;          // timed replays
  double rest = 3.0;            // idle time after each, in its own lengths
  bool replays = true;          // else the work is issued anew each time, and only counted once
};

/// What replays took.
struct CudaReplays {
  std::vector<double> us;
  int64_t kernels = 0;  // launches in the graph
};

/// Its functions nibble_cuda_bench_read, nibble_cuda_bench_kernels and nibble_cuda_bench_replay;
/// nibble_cuda_bench_interface is the number above.
using CudaBenchRead = void(int device, Result<double>& gbps);
using CudaBenchKernels = void(int device, const KernelBenchOptions& options, Result<Json>& report);
using CudaBenchReplay = void(int device, const CudaReplayWork& work, Result<CudaReplays>& replays);

/// The benchmarks of one GPU.
class CudaBench final {
 public:
  /// Opens libnibble_cuda_bench.so beside the libnibble_cuda.so of `options`, or beside the
  /// program's. kUnavailable, with the remedy, where it is not.
  static Result<CudaBench> open(const BackendOptions& options);

  /// GB/s at which the GPU reads its memory.
  [[nodiscard]] Result<double> read_gbps() const;
  /// {"ceilings", "kernels"} of its matrix products.
  [[nodiscard]] Result<Json> kernels(const KernelBenchOptions& options) const;
  /// Issues the work once, records it and times replays of the record, or work issued anew.
  [[nodiscard]] Result<CudaReplays> replay(const CudaReplayWork& work) const;

 private:
  CudaBench() = default;

  int device_ = 0;
  CudaBenchRead* read_ = nullptr;
  CudaBenchKernels* kernels_ = nullptr;
  CudaBenchReplay* replay_ = nullptr;
};

}  // namespace nibble
