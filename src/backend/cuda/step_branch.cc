#include "backend/cuda/step_branch.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/packed_matrices.h"
#include "base/check.h"

namespace nibble::cuda {

StepBranch::~StepBranch() {
  if (library_ != nullptr) {
    library_->remove_stream(stream_.get());
  }
}

Status StepBranch::start() {
  if (place_ == Place::kOneStream || stream_ != nullptr) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(begun_, make_event());
  NIBBLE_ASSIGN_OR_RETURN(ended_, make_event());
  cudaStream_t stream = nullptr;
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                               "making a stream for branches of steps"));
  stream_.reset(stream);
  // Without the library no product is one of its own.
  if (auto library = CublasLt::open(device_); library.ok()) {
    NIBBLE_RETURN_IF_ERROR((*library)->add_stream(stream));
    library_ = std::move(library).value();
  }
  return {};
}

Status StepBranch::reserve(const GemmKernel& kernel, const GemmProblem& problem, int64_t max_m) {
  NIBBLE_RETURN_IF_ERROR(start());
  const int64_t rows = std::min(max_m, kMostRows);
  NIBBLE_RETURN_IF_ERROR(
      scratch_.reserve(scratch_rows(problem, rows), kernel.workspace_bytes(rows)));
  const auto bytes = static_cast<size_t>(rows * problem.n) * sizeof(float);
  if (bytes > results_.size()) {
    results_ = DeviceBuffer();
    NIBBLE_ASSIGN_OR_RETURN(results_, allocate_device(bytes, "results of branches of steps"));
  }
  prepared_ = true;
  return {};
}

int64_t StepBranch::bytes(const StepLimits& limits) {
  if (limits.shared_width == 0) {
    return 0;
  }
  constexpr int64_t kWorkspace = int64_t{32} << 20;  // more than kernels take for so few rows
  const int64_t rows = std::min(limits.rows, kMostRows);
  const int64_t width = std::max(limits.hidden, 2 * limits.shared_width);
  return rows * width * 6 + kWorkspace +
         static_cast<int64_t>(CublasLt::kWorkspaceBytes + CublasLt::kScratchBytes);
}

void StepBranch::begin() {
  CHECK(state_ == State::kNone);
  state_ = State::kOpen;
  if (place_ == Place::kBeside) {
    must(cudaEventRecord(begun_.get(), main_), "beginning a branch of a step");
    must(cudaStreamWaitEvent(stream_.get(), begun_.get(), 0), "beginning a branch of a step");
    behind_event_ = true;
  }
}

void StepBranch::end() {
  CHECK(open());
  state_ = State::kEnded;
  if (place_ == Place::kBeside) {
    must(cudaEventRecord(ended_.get(), stream_.get()), "ending a branch of a step");
  }
}

LaunchContext StepBranch::join() {
  CHECK(ended());
  state_ = State::kNone;
  if (place_ == Place::kOneStream) {
    return {.stream = main_};
  }
  must(cudaStreamWaitEvent(main_, ended_.get(), 0), "joining a branch of a step");
  return {.stream = main_, .overlap = false};
}

LaunchContext StepBranch::next() {
  CHECK(open());
  return place_ == Place::kOneStream
             ? LaunchContext{.stream = main_}
             : LaunchContext{.stream = stream_.get(),
                             .overlap = !std::exchange(behind_event_, false)};
}

}  // namespace nibble::cuda
