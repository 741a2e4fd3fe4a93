#include "base/mapped_bytes.h"

#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include <unistd.h>

namespace nibble {
namespace {

// A call of the system takes as long as copying some hundred bytes; a page that a fault maps is one
// of 16 or more.
constexpr size_t kLeastRead = size_t{16} << 10;

struct Mapping {
  size_t size = 0;
  Descriptor file;
};

/// By their first bytes. Addresses are the process's, and so is this.
struct Mappings {
  std::shared_mutex mutex;
  std::map<const std::byte*, Mapping, std::less<>> by_begin;
};

Mappings& mappings() {
  static Mappings all;
  return all;
}

/// How many of the bytes were read: all but those that the file lacks by now, or that cannot be.
size_t read_mapped(const std::byte* from, size_t count, std::byte* to) {
  Mappings& all = mappings();
  const std::shared_lock lock(all.mutex);
  auto found = all.by_begin.upper_bound(from);
  if (found == all.by_begin.begin()) {
    return 0;
  }
  --found;
  const auto& [begin, mapping] = *found;
  const auto offset = static_cast<size_t>(from - begin);
  if (offset >= mapping.size || count > mapping.size - offset) {
    return 0;
  }
  size_t done = 0;
  while (done < count) {
    const ssize_t got =
        ::pread(mapping.file.get(), to + done, count - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      break;
    }
    done += static_cast<size_t>(got);
  }
  return done;
}

}  // namespace

void copy_bytes(const std::byte* from, size_t count, std::byte* to) {
  const size_t done = count < kLeastRead ? 0 : read_mapped(from, count, to);
  if (done < count) {
    std::memcpy(to + done, from + done, count - done);
  }
}

void note_mapped(std::span<const std::byte> bytes, Descriptor file) {
  Mappings& all = mappings();
  const std::lock_guard lock(all.mutex);
  all.by_begin.insert_or_assign(bytes.data(), Mapping{bytes.size(), std::move(file)});
}

void forget_mapped(std::span<const std::byte> bytes) {
  Mappings& all = mappings();
  const std::lock_guard lock(all.mutex);
  all.by_begin.erase(bytes.data());
}

}  // namespace nibble
