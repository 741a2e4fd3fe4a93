#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <cuda_runtime_api.h>

#include "backend/cuda/memory.h"
#include "base/mapped_bytes.h"
#include "base/status.h"
#include "base/thread_pool.h"

namespace nibble::cuda {

/// Streams bytes from the host to the GPU through page-locked pieces: threads fill one while those
/// before travel.
class Uploader final {
 public:
  // Small enough that the first of an upload travels soon, large enough that threads meet seldom.
  static constexpr size_t kPiece = size_t{16} << 20;

  /// `copy`: CudaBackendOptions::copy.
  static Result<Uploader> create(cudaStream_t stream, CopyBytes* copy = copy_bytes);
  Uploader(Uploader&&) = default;
  Uploader& operator=(Uploader&&) = delete;
  ~Uploader();

  /// Writes `bytes` bytes to `to`. fill(begin, count, out) makes those from `begin` on and is
  /// called by several threads at once, for ranges that begin at multiples of 4096. Returns when
  /// the last piece is on its way.
  using Fill = std::function<void(size_t begin, size_t count, std::byte* out)>;
  Status upload(size_t bytes, const Fill& fill, void* to);
  /// Bytes that lie in host memory or in a mapped file.
  Status upload(const std::byte* from, size_t bytes, void* to);

  /// What all uploads took: the bytes, and the caller's time until a piece was free and full.
  struct Spent {
    size_t bytes = 0;
    std::chrono::duration<double> waiting{};
    std::chrono::duration<double> filling{};
  };
  [[nodiscard]] const Spent& spent() const { return spent_; }
  [[nodiscard]] CopyBytes* copy() const { return copy_; }

 private:
  struct Piece {
    DeviceBuffer memory;
    Event copied;
  };

  Uploader(cudaStream_t stream, CopyBytes* copy) : stream_(stream), copy_(copy) {}

  cudaStream_t stream_;
  CopyBytes* copy_;
  std::unique_ptr<ThreadPool> pool_;
  std::array<Piece, 4> pieces_;
  size_t next_ = 0;
  Spent spent_;
};

}  // namespace nibble::cuda
