#include "base/process.h"

#include <cstdio>

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

namespace nibble {

int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
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

}  // namespace nibble
