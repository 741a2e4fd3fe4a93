#include "backend/cuda/scaled_rope.h"

#include <utility>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {

Result<LaunchContext> ScaledRope::prepare(const RopeAppendArgs& args,
                                          int64_t most_rows,
                                          cudaStream_t stream,
                                          RopeAppendLaunch& launch) {
  if (args.dynamic.original == 0) {
    return LaunchContext{.stream = stream};
  }
  const int64_t pairs = args.kv.head_dim / 2;
  const auto bytes = static_cast<size_t>(most_rows * pairs) * sizeof(float);
  if (bytes > frequencies_.size()) {
    NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer memory, allocate_device(bytes, "scaled frequencies"));
    retired_.push_back(std::exchange(frequencies_, std::move(memory)));
  }
  LaunchContext context{.stream = stream};
  if (made_of_ != args.inv_freq) {
    context.overlap = false;
    NIBBLE_RETURN_IF_ERROR(
        check(row_frequencies({.step = launch.step,
                               .dynamic = args.dynamic,
                               .inv_freq = args.inv_freq,
                               .head_dim = static_cast<int32_t>(args.kv.head_dim),
                               .out = frequencies_.as<float>()},
                              context),
              "scaled frequencies"));
    made_of_ = args.inv_freq;
  }
  launch.inv_freq = frequencies_.as<float>();
  launch.inv_freq_stride = static_cast<int32_t>(pairs);
  return context;
}

}  // namespace nibble::cuda
