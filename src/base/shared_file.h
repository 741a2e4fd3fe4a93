#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/writable_file.h"

namespace nibble {

/// A file that threads write and read at offsets, in any order. All methods may be called
/// from several threads. Move-only. Errors name the path; a full disk is kResourceExhausted.
class SharedFile final {
 public:
  /// Opens the file, creating it if it is not there, and takes its lock: kUnavailable when another
  /// process holds that, kInvalidArgument when it is no regular file.
  static Result<SharedFile> open_locked(const std::string& path);
  Status write_at(int64_t offset, std::span<const std::byte> bytes) {
    return file_.write_at(offset, bytes);
  }
  /// How many bytes there were to read: less than asked for at the end of the file.
  Result<size_t> read_at(int64_t offset, std::span<std::byte> bytes) const;
  Result<int64_t> size() const;
  /// Cuts the file off or extends it with zeros.
  Status resize(int64_t bytes);
  /// Flushes to the device.
  Status sync() { return file_.sync(); }
  /// Lets the system forget the file's pages, which must have been flushed.
  void drop_cache() const;

 private:
  explicit SharedFile(WritableFile file) : file_(std::move(file)) {}

  WritableFile file_;
};

}  // namespace nibble
