#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "base/writable_file.h"

namespace nibble {

/// Whole file as bytes. Errors: kNotFound, kIo, and kInvalidArgument for what is no regular file
/// (nor a link to one): pipes, devices, sockets and folders are refused at once, never waited for.
[[nodiscard]] Result<std::string> read_file(const std::string& path);
/// kInvalidArgument, saying what it is, unless a regular file is open.
[[nodiscard]] Status check_regular(const Descriptor& descriptor, const std::string& path);
[[nodiscard]] bool file_exists(const std::string& path);
/// The last part of a path: what error messages name.
[[nodiscard]] std::string_view file_name(std::string_view path);

/// A file mapped read-only. The bytes stay valid while this object lives, also when another process
/// replaces the file by renaming over it. Move-only.
class MappedFile final {
 public:
  /// Errors as of read_file().
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }
  [[nodiscard]] const std::string& path() const { return path_; }
  /// Tells the system that this part will be read soon.
  void read_ahead(std::span<const std::byte> part) const;
  /// Tells the system that this part will not be read again soon: keeps resident memory small. Also
  /// unmaps the neighbours that the system mapped along; whoever reads them maps them again.
  void drop_pages(std::span<const std::byte> part) const;

 private:
  MappedFile() = default;
  void release();
  void advise(std::span<const std::byte> part, size_t unit, int advice) const;

  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// A new file being written. Move-only. Errors name the path; a full disk is kResourceExhausted. A
/// file that is not finished stays on disk: its owner removes the folder.
class OutputFile final {
 public:
  /// kAlreadyExists when the file is there.
  static Result<OutputFile> create(const std::string& path);
  Status write(std::span<const std::byte> bytes);
  Status write(std::string_view text);
  /// Writes at an offset from the front, leaving the place of write() alone.
  Status write_at(int64_t offset, std::span<const std::byte> bytes);
  /// Flushes to the device and closes.
  Status finish();
  [[nodiscard]] int64_t bytes_written() const { return bytes_written_; }

 private:
  explicit OutputFile(WritableFile file) : file_(std::move(file)) {}

  WritableFile file_;
  int64_t end_ = 0;  // where write() goes on
  int64_t bytes_written_ = 0;
};

/// Makes renames and new names in this folder durable.
Status sync_directory(const std::string& path);

/// "PATH: cannot WHAT: ..." for an errno; a full disk is kResourceExhausted.
[[nodiscard]] Status file_error(const std::string& path, std::string_view what, int error);

/// Gives a file another name in one step, in the place of what has that name.
Status rename_file(const std::string& from, const std::string& to);

}  // namespace nibble
