#include "backend/cuda/step_recorder.h"

#include <algorithm>
#include <bit>

#include "backend/cuda/cuda_status.h"
#include "base/log.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kFinest = 8;  // sizes above are multiples of it, or of an eighth of themselves

}  // namespace

StepRecorder::~StepRecorder() {
  for (const auto& [key, graph] : graphs_) {
    if (graph != nullptr) {
      cudaGraphExecDestroy(graph);
    }
  }
}

int64_t StepRecorder::bucket(int64_t rows, int64_t most) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  const int64_t step = std::max(kFinest, power / 8);
  return std::min(most, power <= kFinest ? power : (rows + step - 1) / step * step);
}

Result<cudaGraphExec_t> StepRecorder::record(const std::function<void()>& issue) {
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed),
                               "starting to record a step"));
  issue();
  cudaGraph_t graph = nullptr;
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamEndCapture(stream_, &graph), "recording a step"));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  if (made == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // who looks at it next is not to find it
    return nullptr;
  }
  NIBBLE_RETURN_IF_ERROR(check(made, "recording a step"));
  return executable;
}

Status StepRecorder::run(int64_t program, int64_t rows, const std::function<void()>& issue) {
  auto found = graphs_.find({program, rows});
  if (found == graphs_.end()) {
    NIBBLE_ASSIGN_OR_RETURN(const cudaGraphExec_t graph, record(issue));
    found = graphs_.emplace(std::pair{program, rows}, graph).first;
    if (graph == nullptr) {
      NIBBLE_LOG(kWarning, "no GPU memory left to record steps of {} sequences: they are slower",
                 rows);
    }
  }
  if (found->second == nullptr) {
    issue();
    return {};
  }
  return check(cudaGraphLaunch(found->second, stream_), "running a recorded step");
}

}  // namespace nibble::cuda
