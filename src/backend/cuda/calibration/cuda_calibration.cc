#include "backend/cuda/calibration/cuda_calibration.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "backend/cuda/calibration/calibration_work.h"
#include "backend/cuda/calibration/cuda_site.h"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace nibble::cuda {
namespace {

class CudaCalibration final : public CalibrationMath {
 public:
  explicit CudaCalibration(std::unique_ptr<CalibrationWork> work) : work_(std::move(work)) {}
  ~CudaCalibration() override {
    cudaStreamSynchronize(work_->stream);
    for (cudaStream_t stream : {in_, out_}) {
      if (stream != nullptr) {
        cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
      }
    }
  }

  Status start() {
    for (cudaStream_t* stream : {&in_, &out_}) {
      NIBBLE_RETURN_IF_ERROR(
          check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream"));
    }
    for (Slot& slot : slots_) {
      NIBBLE_ASSIGN_OR_RETURN(slot.fetched, make_event());
      NIBBLE_ASSIGN_OR_RETURN(slot.computed, make_event());
      NIBBLE_ASSIGN_OR_RETURN(slot.stored, make_event());
    }
    return {};
  }

  Result<std::unique_ptr<SiteMath>> make_site(int64_t k, ActFormat act) override {
    return CudaSite::create(*work_, k, act);
  }

  Status factor_ahead(std::span<const SiteToFactor> sites) override {
    if (sites.empty()) {
      return {};
    }
    std::vector<CudaFactors::Request> requests;
    for (const SiteToFactor& each : sites) {
      const auto& site = dynamic_cast<const CudaSite&>(*each.site);
      CHECK_EQ(site.k(), sites.front().site->k());
      requests.push_back({&site, site.sums(), each.order, each.damping});
    }
    return work_->ahead.make(*work_, sites.front().site->k(), requests);
  }

  void upload(void* to, std::span<const std::byte> from) override {
    must(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, work_->stream),
         "copying to the GPU");
    must(cudaStreamSynchronize(work_->stream), "copying to the GPU");
  }
  void download(std::span<std::byte> to, const void* from) override {
    must(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, work_->stream),
         "copying from the GPU");
    must(cudaStreamSynchronize(work_->stream), "copying from the GPU");
  }

  Result<DeviceBuffer> allocate_pinned(size_t bytes) override {
    return cuda::allocate_pinned(bytes);
  }

  void fetch(int slot, void* to, std::span<const std::byte> from) override {
    const Slot& events = slots_.at(static_cast<size_t>(slot));
    wait_on(in_, events.computed);
    wait_on(in_, events.stored);
    must(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, in_),
         "copying hidden states");
    record(events.fetched, in_);
  }

  void begin(int slot) override {
    wait_on(work_->stream, slots_.at(static_cast<size_t>(slot)).fetched);
    wait_on(work_->stream,
            slots_.at(static_cast<size_t>(slot)).stored);  // where nothing is fetched
    work_->forward_timer.start(work_->stream);
  }

  void end(int slot) override {
    work_->forward_timer.stop(work_->stream);
    record(slots_.at(static_cast<size_t>(slot)).computed, work_->stream);
  }

  void store(int slot, std::span<std::byte> to, const void* from) override {
    const Slot& events = slots_.at(static_cast<size_t>(slot));
    wait_on(out_, events.computed);
    must(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, out_),
         "copying hidden states");
    record(events.stored, out_);
  }

  void wait(int slot) override {
    const Slot& events = slots_.at(static_cast<size_t>(slot));
    must(cudaEventSynchronize(events.fetched.get()), "copying hidden states");
    must(cudaEventSynchronize(events.computed.get()), "a step");
    must(cudaEventSynchronize(events.stored.get()), "copying hidden states");
  }

  DeviceSeconds take_seconds() override {
    DeviceSeconds seconds{.forward = work_->forward_timer.take(),
                          .sums = work_->sums_timer.take(),
                          .factor = work_->factor_timer.take(),
                          .rounding = work_->rounding_timer.take()};
    // Most sums are made while a slot's steps run.
    seconds.forward = std::max(0.0, seconds.forward - seconds.sums);
    return seconds;
  }

 private:
  struct Slot {
    Event fetched, computed, stored;
  };

  static void wait_on(cudaStream_t stream, const Event& event) {
    must(cudaStreamWaitEvent(stream, event.get(), 0), "waiting for an event");
  }
  static void record(const Event& event, cudaStream_t stream) {
    must(cudaEventRecord(event.get(), stream), "recording an event");
  }

  std::unique_ptr<CalibrationWork> work_;
  cudaStream_t in_ = nullptr;
  cudaStream_t out_ = nullptr;
  std::array<Slot, kSlots> slots_;
};

}  // namespace

Result<std::unique_ptr<CalibrationMath>> make_cuda_calibration(cudaStream_t stream) {
  NIBBLE_ASSIGN_OR_RETURN(auto work, CalibrationWork::create(stream));
  auto made = std::make_unique<CudaCalibration>(std::move(work));
  NIBBLE_RETURN_IF_ERROR(made->start());
  return std::unique_ptr<CalibrationMath>(std::move(made));
}

}  // namespace nibble::cuda
