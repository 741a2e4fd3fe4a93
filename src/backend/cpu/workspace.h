#pragma once

#include <cstdint>

#include "backend/cpu/kernel_table.h"
#include "base/thread_pool.h"
#include "core/buffer.h"

namespace nibble::cpu {

/// Memory that one product at a time uses, shared by all matrices of a backend: reserved when they
/// are prepared, so that a step allocates nothing.
class Workspace final {
 public:
  explicit Workspace(ThreadPool& pool) : pool_(pool) {}

  [[nodiscard]] ThreadPool& pool() { return pool_; }

  /// Room for rounded activations of `rows` rows of k columns, whatever their form.
  Status reserve(int64_t rows, int64_t k);
  /// Room for the sums of tile products, for each thread.
  Status reserve_tiles();

  [[nodiscard]] std::byte* activations() { return activations_.data(); }
  [[nodiscard]] float* scales() { return scales_.as<float>().data(); }
  [[nodiscard]] int32_t* sums() { return sums_.as<int32_t>().data(); }
  /// One row of k f32, of a thread.
  [[nodiscard]] float* row(int thread) {
    return rows_.as<float>().data() + 2 * thread * row_floats_;
  }
  /// Another one.
  [[nodiscard]] float* spare_row(int thread) { return row(thread) + row_floats_; }
  [[nodiscard]] uint8_t* tile_scratch(int thread) {
    return reinterpret_cast<uint8_t*>(tiles_.data()) + thread * kTileScratchBytes;
  }

 private:
  ThreadPool& pool_;
  int64_t row_floats_ = 0;
  Buffer activations_;
  Buffer scales_;
  Buffer sums_;
  Buffer rows_;
  Buffer tiles_;
};

/// fn(row, thread) for every row, on one thread when the rows have few elements together.
template <typename Fn>
void for_rows(ThreadPool& pool, int64_t rows, int64_t elements_per_row, const Fn& fn) {
  constexpr int64_t kSerialElements = 8 << 10;  // below, starting a loop costs more than it gains
  if (rows * elements_per_row <= kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) {
      fn(row, 0);
    }
    return;
  }
  pool.parallel_for(rows, fn);
}

}  // namespace nibble::cpu
