#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"

namespace nibble {

/// An open file of the system, closed with this object. Move-only.
class Descriptor final {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  /// Negative when nothing is open.
  [[nodiscard]] int get() const { return value_; }
  /// Leaves closing to the caller.
  int release();

 private:
  int value_ = -1;
};

/// A file that is written at offsets, by several threads if need be. Whenever some bytes have
/// gathered, sending them to the device starts, so that neither unwritten pages pile up nor
/// flushing takes long. Move-only; errors name the path, and a full disk is kResourceExhausted.
class WritableFile final {
 public:
  WritableFile(Descriptor descriptor, std::string path)
      : path_(std::move(path)), descriptor_(std::move(descriptor)) {}
  WritableFile(WritableFile&& other) noexcept;
  WritableFile& operator=(WritableFile&& other) noexcept;
  WritableFile(const WritableFile&) = delete;
  WritableFile& operator=(const WritableFile&) = delete;
  ~WritableFile() = default;

  Status write_at(int64_t offset, std::span<const std::byte> bytes);
  /// Flushes to the device.
  Status sync();
  Status close();
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] int descriptor() const { return descriptor_.get(); }

 private:
  void write_behind(int64_t count);

  std::string path_;
  Descriptor descriptor_;
  std::atomic<int64_t> unwritten_{0};
};

}  // namespace nibble
