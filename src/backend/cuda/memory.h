#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "base/math.h"
#include "base/status.h"
#include "core/device_buffer.h"

namespace nibble::cuda {

/// GPU memory of the current device, uninitialised, 256-byte aligned. kResourceExhausted names
/// `what` it was for, the size, and what the GPU has left.
Result<DeviceBuffer> allocate_device(size_t bytes, std::string_view what);

/// The same, filled with zeros.
Result<DeviceBuffer> allocate_zeroed(size_t bytes, std::string_view what);

/// Fills GPU memory with a byte, or copies `bytes` to it from any host memory, and waits for that:
/// CUDA's own functions may return before, and streams that do not block would not wait.
Status fill_device(void* to, int byte, size_t bytes);
Status copy_to_device(void* to, const void* from, size_t bytes);

/// Page-locked host memory, which copies to and from the GPU run beside kernels.
Result<DeviceBuffer> allocate_pinned(size_t bytes);

/// Where the next `bytes` of a buffer lie, aligned to 256 bytes; moves `end` behind them.
inline size_t place(size_t& end, size_t bytes) {
  const size_t at = end;
  end = round_up(end + bytes, 256);
  return at;
}

struct EventDeleter {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EventDeleter>;

/// An event without a time.
Result<Event> make_event();

/// GPU memory that is free now, of all processes. 0 when the driver does not say.
size_t free_device_memory();

}  // namespace nibble::cuda
