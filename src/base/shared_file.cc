#include "base/shared_file.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

namespace nibble {

Result<SharedFile> SharedFile::open_locked(const std::string& path) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  Descriptor descriptor(::open(path.c_str(), kFlags, 0644));
  if (descriptor.get() < 0) {
    return file_error(path, "open", errno);
  }
  NIBBLE_RETURN_IF_ERROR(check_regular(descriptor, path));
  if (::flock(descriptor.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return make_error(StatusCode::kUnavailable,
                        "{}: another process is writing it; wait for that one or stop it", path);
    }
    return file_error(path, "lock", errno);
  }
  return SharedFile(WritableFile(std::move(descriptor), path));
}

Result<size_t> SharedFile::read_at(int64_t offset, std::span<std::byte> bytes) const {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = ::pread(file_.descriptor(), bytes.data() + done, bytes.size() - done,
                                  offset + static_cast<int64_t>(done));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      return file_error(file_.path(), "read", errno);
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
  if (::fstat(file_.descriptor(), &info) != 0) {
    return file_error(file_.path(), "examine", errno);
  }
  return static_cast<int64_t>(info.st_size);
}

Status SharedFile::resize(int64_t bytes) {
  return ::ftruncate(file_.descriptor(), bytes) == 0 ? Status()
                                                     : file_error(file_.path(), "resize", errno);
}

void SharedFile::drop_cache() const {
  static_cast<void>(::posix_fadvise(file_.descriptor(), 0, 0, POSIX_FADV_DONTNEED));
}

}  // namespace nibble
