#include "base/file.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mapped_bytes.h"

namespace nibble {
namespace {

// A fault on a mapped file maps the pages around it too: since Linux 6.18 the whole large folio,
// but nothing beyond the aligned piece of this size, which one page of page tables covers.
constexpr size_t kFaultAround = 2 << 20;

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) {
    return "a folder";
  }
  if (S_ISFIFO(mode)) {
    return "a pipe (FIFO)";
  }
  return S_ISSOCK(mode) ? "a socket" : "a device";
}

Status not_regular(const std::string& path, mode_t mode) {
  return make_error(StatusCode::kInvalidArgument, "{}: is {}, but must be a regular file{}", path,
                    kind_of(mode), S_ISDIR(mode) ? "" : "; save its content as one");
}

Result<struct stat> examine_regular(const Descriptor& descriptor, const std::string& path) {
  struct stat info = {};
  if (::fstat(descriptor.get(), &info) != 0) {
    return file_error(path, "examine", errno);
  }
  return S_ISREG(info.st_mode) ? Result<struct stat>(info) : not_regular(path, info.st_mode);
}

struct OpenFile {
  Descriptor descriptor;
  size_t size = 0;
};

// Opens a regular file for reading; others may be endless, and opening a FIFO would wait for its
// writer.
Result<OpenFile> open_regular(const std::string& path) {
  OpenFile file;
  file.descriptor = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info = {};
  if (file.descriptor.get() < 0) {
    const int error = errno;
    const bool socket =
        error == ENXIO && ::stat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
    return socket ? not_regular(path, info.st_mode) : file_error(path, "open", error);
  }
  NIBBLE_ASSIGN_OR_RETURN(info, examine_regular(file.descriptor, path));
  file.size = static_cast<size_t>(info.st_size);
  return file;
}

}  // namespace

Status file_error(const std::string& path, std::string_view what, int error) {
  StatusCode code = StatusCode::kIo;
  if (error == ENOENT || error == ENOTDIR) {
    code = StatusCode::kNotFound;
  } else if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM) {
    code = StatusCode::kResourceExhausted;
  } else if (error == EEXIST) {
    code = StatusCode::kAlreadyExists;
  }
  return make_error(code, "{}: cannot {}: {}", path, what, std::strerror(error));
}

Result<std::string> read_file(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const OpenFile file, open_regular(path));
  const size_t size = file.size;
  std::string text(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t count = ::read(file.descriptor.get(), text.data() + done, size - done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      return file_error(path, "read", errno);
    }
    if (count == 0) {
      break;  // it shrank meanwhile
    }
    done += static_cast<size_t>(count);
  }
  text.resize(done);
  return text;
}

Status check_regular(const Descriptor& descriptor, const std::string& path) {
  return examine_regular(descriptor, path).status();
}

bool file_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::string_view file_name(std::string_view path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(OpenFile opened, open_regular(path));
  MappedFile file;
  file.size_ = opened.size;
  file.path_ = path;
  if (file.size_ == 0) {
    return file;
  }
  void* data = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, opened.descriptor.get(), 0);
  if (data == MAP_FAILED) {
    return file_error(path, "map", errno);
  }
  file.data_ = static_cast<const std::byte*>(data);
  note_mapped(file.bytes(), std::move(opened.descriptor));
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    release();
    path_ = std::move(other.path_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

MappedFile::~MappedFile() { release(); }

void MappedFile::release() {
  if (data_ != nullptr) {
    forget_mapped(bytes());
    ::munmap(const_cast<std::byte*>(data_), size_);
    data_ = nullptr;
  }
}

void MappedFile::advise(std::span<const std::byte> part, size_t unit, int advice) const {
  if (part.empty()) {
    return;
  }
  // Units are those of addresses: the mapping itself begins at any page.
  const auto front = reinterpret_cast<uintptr_t>(data_);
  const auto first = reinterpret_cast<uintptr_t>(part.data());
  const uintptr_t begin = std::max(front, first / unit * unit);
  const uintptr_t end = std::min(front + size_, (first + part.size() + unit - 1) / unit * unit);
  // Advice only: a refusal costs time or memory, never correctness.
  static_cast<void>(
      ::madvise(const_cast<std::byte*>(data_ + (begin - front)), end - begin, advice));
}

void MappedFile::read_ahead(std::span<const std::byte> part) const {
  advise(part, static_cast<size_t>(::sysconf(_SC_PAGESIZE)), MADV_WILLNEED);
}

void MappedFile::drop_pages(std::span<const std::byte> part) const {
  advise(part, kFaultAround, MADV_DONTNEED);
}

Result<OutputFile> OutputFile::create(const std::string& path) {
  Descriptor descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (descriptor.get() < 0) {
    return file_error(path, "create", errno);
  }
  return OutputFile(WritableFile(std::move(descriptor), path));
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  NIBBLE_RETURN_IF_ERROR(write_at(end_, bytes));
  end_ += static_cast<int64_t>(bytes.size());
  return {};
}

Status OutputFile::write(std::string_view text) {
  return write(std::as_bytes(std::span(text.data(), text.size())));
}

Status OutputFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  NIBBLE_RETURN_IF_ERROR(file_.write_at(offset, bytes));
  bytes_written_ += static_cast<int64_t>(bytes.size());
  return {};
}

Status OutputFile::finish() {
  const Status flushed = file_.sync();
  const Status closed = file_.close();
  return flushed.ok() ? closed : flushed;
}

Status sync_directory(const std::string& path) {
  const Descriptor descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.get() < 0) {
    return file_error(path, "open", errno);
  }
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL) {  // some file systems cannot
    return file_error(path, "flush", errno);
  }
  return {};
}

Status rename_file(const std::string& from, const std::string& to) {
  return std::rename(from.c_str(), to.c_str()) == 0
             ? Status()
             : file_error(from, fmt::format("rename to {}", to), errno);
}

}  // namespace nibble
