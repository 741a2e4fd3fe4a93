#include "base/shared_file.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

namespace nibble {
namespace {

constexpr int64_t kWriteBehind = int64_t{32} << 20;

}  // namespace

Result<SharedFile> SharedFile::open_locked(const std::string& path) {
  SharedFile file;
  file.path_ = path;
  file.unwritten_ = std::make_unique<std::atomic<int64_t>>(0);
  file.descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file.descriptor_ < 0) {
    return file_error(path, "open", errno);
  }
  if (::flock(file.descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return make_error(StatusCode::kUnavailable,
                        "{}: another process is writing it; wait for that one or stop it", path);
    }
    return file_error(path, "lock", errno);
  }
  return file;
}

SharedFile::SharedFile(SharedFile&& other) noexcept { *this = std::move(other); }

SharedFile& SharedFile::operator=(SharedFile&& other) noexcept {
  if (this != &other) {
    close();
    path_ = std::move(other.path_);
    descriptor_ = std::exchange(other.descriptor_, -1);
    unwritten_ = std::move(other.unwritten_);
  }
  return *this;
}

SharedFile::~SharedFile() { close(); }

void SharedFile::close() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    descriptor_ = -1;
  }
}

Status SharedFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  const auto total = static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const ssize_t count = ::pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      return file_error(path_, "write", errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += count;
  }
  if (unwritten_->fetch_add(total) + total >= kWriteBehind) {
    unwritten_->store(0);
    // Waits for what the call before this one started; advice, so a refusal does not matter.
    static_cast<void>(
        ::sync_file_range(descriptor_, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE));
    // Pages that are written serve again at once: in a virtual machine new ones are slow to get
    // (measured: 1.5 GB/s instead of 0.2).
    static_cast<void>(::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED));
  }
  return {};
}

Result<size_t> SharedFile::read_at(int64_t offset, std::span<std::byte> bytes) const {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = ::pread(descriptor_, bytes.data() + done, bytes.size() - done,
                                  offset + static_cast<int64_t>(done));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      return file_error(path_, "read", errno);
    }
    if (count == 0) {
      break;
    }
    done += static_cast<size_t>(count);
  }
  return done;
}

Result<int64_t> SharedFile::size() const {
  struct stat info = {};
  if (::fstat(descriptor_, &info) != 0) {
    return file_error(path_, "examine", errno);
  }
  return static_cast<int64_t>(info.st_size);
}

Status SharedFile::resize(int64_t bytes) {
  return ::ftruncate(descriptor_, bytes) == 0 ? Status() : file_error(path_, "resize", errno);
}

Status SharedFile::sync() {
  return ::fsync(descriptor_) == 0 ? Status() : file_error(path_, "flush", errno);
}

void SharedFile::drop_cache() const {
  static_cast<void>(::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED));
}

}  // namespace nibble
