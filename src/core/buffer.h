#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/status.h"

namespace nibble {

/// Owned, uninitialised host memory, 64-byte aligned. Buffers of 2 MiB and more are 2 MiB aligned
/// and ask for huge pages: reading weights through 4 KiB pages costs a third of the bandwidth on
/// virtual machines (docs/performance.md). Move-only.
class Buffer final {
 public:
  Buffer() = default;
  /// Fails with kResourceExhausted, naming the size.
  static Result<Buffer> allocate(size_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  [[nodiscard]] std::byte* data() { return data_; }
  [[nodiscard]] const std::byte* data() const { return data_; }
  [[nodiscard]] size_t size() const { return size_; }
  /// The memory as elements of T; size() must be a multiple of sizeof(T).
  template <typename T>
  [[nodiscard]] std::span<T> as() {
    return {reinterpret_cast<T*>(data_), size_ / sizeof(T)};
  }
  template <typename T>
  [[nodiscard]] std::span<const T> as() const {
    return {reinterpret_cast<const T*>(data_), size_ / sizeof(T)};
  }

 private:
  friend class BufferArena;

  void release();

  std::byte* data_ = nullptr;
  size_t size_ = 0;      // bytes asked for
  size_t reserved_ = 0;  // bytes mapped; 0: they belong to block_
  std::shared_ptr<const Buffer> block_;
};

/// Cuts buffers out of large blocks, so that many of them share huge pages without gaps. A block
/// lives as long as one of its buffers; memory that nobody touched is not resident. One thread at a
/// time.
class BufferArena final {
 public:
  /// Uninitialised and 64-byte aligned, like Buffer::allocate().
  Result<Buffer> allocate(size_t bytes);

 private:
  std::shared_ptr<Buffer> block_;
  size_t used_ = 0;  // bytes of block_
};

}  // namespace nibble
