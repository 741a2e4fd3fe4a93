#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace nibble {

/// A file that threads write and read at offsets, in any order. All methods but close() may be
/// called from several threads. Move-only. Errors name the path; a full disk is kResourceExhausted.
class SharedFile final {
 public:
  /// Opens the file, creating it if it is not there, and takes its lock: kUnavailable when another
  /// process holds that.
  static Result<SharedFile> open_locked(const std::string& path);
  SharedFile(SharedFile&& other) noexcept;
  SharedFile& operator=(SharedFile&& other) noexcept;
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  ~SharedFile();

  /// Writes in the background start once some bytes have gathered, so that neither unwritten pages
  /// pile up nor flushing takes long.
  Status write_at(int64_t offset, std::span<const std::byte> bytes);
  /// How many bytes there were to read: less than asked for at the end of the file.
  Result<size_t> read_at(int64_t offset, std::span<std::byte> bytes) const;
  Result<int64_t> size() const;
  /// Cuts the file off or extends it with zeros.
  Status resize(int64_t bytes);
  /// Flushes to the device.
  Status sync();
  /// Lets the system forget the file's pages, which must have been flushed.
  void drop_cache() const;

 private:
  SharedFile() = default;
  void close();

  std::string path_;
  int descriptor_ = -1;
  std::unique_ptr<std::atomic<int64_t>> unwritten_;
};

}  // namespace nibble
