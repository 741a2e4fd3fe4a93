#include "backend/cuda/calibration/device_timer.h"

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {
namespace {

Event timed_event() {
  cudaEvent_t event = nullptr;
  must(cudaEventCreate(&event), "making an event");
  return Event(event);
}

}  // namespace

void DeviceTimer::start(cudaStream_t stream) {
  if (used_ == intervals_.size()) {
    intervals_.push_back({timed_event(), timed_event()});
  }
  must(cudaEventRecord(intervals_[used_].begin.get(), stream), "recording an event");
}

void DeviceTimer::stop(cudaStream_t stream) {
  must(cudaEventRecord(intervals_[used_].end.get(), stream), "recording an event");
  ++used_;
}

double DeviceTimer::take() {
  double seconds = 0;
  for (size_t i = 0; i < used_; ++i) {
    float milliseconds = 0;
    must(cudaEventSynchronize(intervals_[i].end.get()), "a calibration");
    must(cudaEventElapsedTime(&milliseconds, intervals_[i].begin.get(), intervals_[i].end.get()),
         "timing");
    seconds += 1e-3 * static_cast<double>(milliseconds);
  }
  used_ = 0;
  return seconds;
}

}  // namespace nibble::cuda
