#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "base/status.h"

namespace nibble::gguf {

/// Reads a file from front to back; every read says what it reads, for the error of a file that
/// ends before it.
class Cursor final {
 public:
  explicit Cursor(std::span<const std::byte> file) : file_(file) {}

  template <typename T>
  Result<T> number(std::string_view what) {
    T value;
    NIBBLE_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, take(sizeof(T), what));
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  /// A length of 64 bits and as many bytes.
  Result<std::string_view> string(std::string_view what);
  Result<std::span<const std::byte>> take(uint64_t count, std::string_view what);
  /// A number of things of at least `smallest` bytes each; kCorrupt if the rest cannot hold them.
  Result<uint64_t> count(uint64_t smallest, std::string_view what);
  Status check_count(uint64_t count, uint64_t smallest, std::string_view what) const;

  [[nodiscard]] uint64_t at() const { return at_; }
  [[nodiscard]] uint64_t remaining() const { return file_.size() - at_; }
  [[nodiscard]] std::span<const std::byte> since(uint64_t begin) const {
    return file_.subspan(begin, at_ - begin);
  }

 private:
  std::span<const std::byte> file_;
  uint64_t at_ = 0;
};

}  // namespace nibble::gguf
