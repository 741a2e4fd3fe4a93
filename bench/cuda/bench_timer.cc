#include "bench/cuda/bench_timer.h"

#include "backend/cuda/memory.h"

namespace nibble::cuda {

Result<DeviceMemory> DeviceMemory::allocate(size_t bytes) {
  DeviceMemory memory;
  NIBBLE_RETURN_IF_ERROR(check(cudaMalloc(&memory.data_, std::max<size_t>(bytes, 256)),
                               "allocating memory for a benchmark"));
  NIBBLE_RETURN_IF_ERROR(fill_device(memory.data_, 0, bytes));
  return memory;
}

Result<std::unique_ptr<Timer>> Timer::make() {
  auto timer = std::make_unique<Timer>();
  NIBBLE_RETURN_IF_ERROR(
      check(cudaStreamCreateWithFlags(&timer->stream_, cudaStreamNonBlocking), "making a stream"));
  NIBBLE_RETURN_IF_ERROR(check(cudaEventCreate(&timer->begin_), "making an event"));
  NIBBLE_RETURN_IF_ERROR(check(cudaEventCreate(&timer->end_), "making an event"));
  NIBBLE_ASSIGN_OR_RETURN(timer->released_, allocate_pinned(sizeof(uint32_t)));
  return timer;
}

}  // namespace nibble::cuda
