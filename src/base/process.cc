#include "base/process.h"

#include <cstdio>

#include <malloc.h>
#include <unistd.h>

namespace nibble {

int64_t peak_rss_bytes() {
  // Not getrusage(): its maximum outlives exec(), so that it may be that of who started us.
  std::FILE* file = std::fopen("/proc/self/status", "re");
  if (file == nullptr) {
    return 0;
  }
  long long kib = 0;
  char line[256];
  while (std::fgets(line, sizeof(line), file) != nullptr &&
         std::sscanf(line, "VmHWM: %lld kB", &kib) != 1) {
  }
  std::fclose(file);
  return int64_t{kib} * 1024;
}

int64_t rss_bytes() {
  // Not read_file(): files of /proc have no size.
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  long long total = 0;
  long long resident = 0;
  if (file == nullptr) {
    return 0;
  }
  const int fields = std::fscanf(file, "%lld %lld", &total, &resident);
  std::fclose(file);
  return fields == 2 ? int64_t{resident} * ::sysconf(_SC_PAGESIZE) : 0;
}

void release_free_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

void bound_free_memory() {
#if defined(__GLIBC__)
  // By default glibc learns both from the largest block freed so far, up to these 32 MiB and twice
  // as much at the end of a heap. Once one is set, it learns neither.
  constexpr int kOwnMappingFrom = 32 << 20;
  constexpr int kMostAtEnd = 4 << 20;
  mallopt(M_MMAP_THRESHOLD, kOwnMappingFrom);
  mallopt(M_TRIM_THRESHOLD, kMostAtEnd);
#endif
}

}  // namespace nibble
