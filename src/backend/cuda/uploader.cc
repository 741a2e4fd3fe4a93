#include "backend/cuda/uploader.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"
#include "base/cpu_topology.h"

namespace nibble::cuda {
namespace {

// A thread copies 3 to 9 GB/s out of the page cache (measured on a Sapphire Rapids, rows that lie
// in turns slowest), and a slot of PCIe 5 takes 63.
constexpr int kMostThreads = 16;
constexpr size_t kShare = size_t{256} << 10;  // bytes that a thread fills at a time

}  // namespace

Result<Uploader> Uploader::create(cudaStream_t stream, CopyBytes* copy) {
  Uploader uploader(stream, copy);
  const int threads = std::min(kMostThreads, read_cpu_topology().usable_cpus());
  uploader.pool_ = std::make_unique<ThreadPool>(threads);
  for (Piece& piece : uploader.pieces_) {
    NIBBLE_ASSIGN_OR_RETURN(piece.memory, allocate_pinned(kPiece));
    NIBBLE_ASSIGN_OR_RETURN(piece.copied, make_event());
  }
  return uploader;
}

Uploader::~Uploader() {
  for (const Piece& piece : pieces_) {
    if (piece.copied != nullptr) {
      cudaEventSynchronize(piece.copied.get());
    }
  }
}

Status Uploader::upload(size_t bytes, const Fill& fill, void* to) {
  for (size_t begin = 0; begin < bytes; begin += kPiece) {
    const size_t size = std::min(kPiece, bytes - begin);
    Piece& piece = pieces_[next_];
    next_ = (next_ + 1) % pieces_.size();
    const auto start = std::chrono::steady_clock::now();
    NIBBLE_RETURN_IF_ERROR(check(cudaEventSynchronize(piece.copied.get()), "copying to the GPU"));
    const auto free = std::chrono::steady_clock::now();
    auto* out = piece.memory.as<std::byte>();
    pool_->parallel_for(static_cast<int64_t>((size + kShare - 1) / kShare), [&](int64_t i, int) {
      const size_t at = static_cast<size_t>(i) * kShare;
      fill(begin + at, std::min(kShare, size - at), out + at);
    });
    spent_.bytes += size;
    spent_.waiting += free - start;
    spent_.filling += std::chrono::steady_clock::now() - free;
    NIBBLE_RETURN_IF_ERROR(check(cudaMemcpyAsync(static_cast<std::byte*>(to) + begin, out, size,
                                                 cudaMemcpyHostToDevice, stream_),
                                 "copying to the GPU"));
    NIBBLE_RETURN_IF_ERROR(
        check(cudaEventRecord(piece.copied.get(), stream_), "recording an event"));
  }
  return {};
}

Status Uploader::upload(const std::byte* from, size_t bytes, void* to) {
  return upload(
      bytes, [&](size_t begin, size_t count, std::byte* out) { copy_(from + begin, count, out); },
      to);
}

}  // namespace nibble::cuda
