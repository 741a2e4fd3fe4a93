// Writes when each kernel and copy of a program began and ended on the GPU, with CUPTI, to
// kernel_trace.txt in the current folder. The driver loads it into any CUDA program:
// CUDA_INJECTION64_PATH=/path/of/libkernel_trace.so.
// A line per record: kernel or copy, begin and end in ns, launch (of a whole graph: one number),
// blocks, bytes copied, name. step_profile.py makes a table of it.
//
// g++ -O2 -shared -fPIC -std=c++20 kernel_trace.cc -I CUDA/include -L CUDA/lib64 -lcupti
//     -o libkernel_trace.so

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include <cupti.h>

namespace {

struct Record {
  bool copy = false;
  uint64_t begin = 0, end = 0;
  uint32_t launch = 0;
  int64_t blocks = 0, bytes = 0;
  std::string name;
};

constexpr size_t kBufferBytes = size_t{8} << 20;

std::mutex mutex;
std::vector<Record>& records() {
  static auto* all = new std::vector<Record>;  // lives longer than other destructors
  return *all;
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = kBufferBytes;
  *most_records = 0;
}

void take(const CUpti_Activity* activity) {
  if (activity->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(activity);
    records().push_back({.begin = kernel->start,
                         .end = kernel->end,
                         .launch = kernel->correlationId,
                         .blocks = int64_t{kernel->gridX} * kernel->gridY * kernel->gridZ,
                         .name = kernel->name});
  } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(activity);
    const char* way = copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? "to the GPU"
                      : copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "to the host"
                                                                          : "on the GPU";
    records().push_back({.copy = true,
                         .begin = copy->start,
                         .end = copy->end,
                         .launch = copy->correlationId,
                         .bytes = static_cast<int64_t>(copy->bytes),
                         .name = way});
  }
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard lock(mutex);
  CUpti_Activity* activity = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
    take(activity);
  }
  std::free(buffer);
}

void write_all() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  std::FILE* file = std::fopen("kernel_trace.txt", "w");
  if (file == nullptr) {
    std::perror("kernel_trace");
    return;
  }
  const std::lock_guard lock(mutex);
  for (const Record& record : records()) {
    std::fprintf(file, "%s %llu %llu %u %lld %lld %s\n", record.copy ? "copy" : "kernel",
                 static_cast<unsigned long long>(record.begin),
                 static_cast<unsigned long long>(record.end), record.launch,
                 static_cast<long long>(record.blocks), static_cast<long long>(record.bytes),
                 record.name.c_str());
  }
  std::fclose(file);
}

}  // namespace

extern "C" int InitializeInjection() {
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY}) {
    if (const CUptiResult result = cuptiActivityEnable(kind); result != CUPTI_SUCCESS) {
      std::fprintf(stderr, "kernel_trace: CUPTI refuses to trace (%d)\n", result);
      return 0;
    }
  }
  std::atexit(write_all);
  return 1;
}
