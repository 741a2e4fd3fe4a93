#include "bench/cuda/replay_bench.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "bench/cuda/bench_timer.h"

namespace nibble::cuda {
namespace {

struct GraphDeleter {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, GraphDeleter>;

/// Recorded as a backend records its steps.
Result<Graph> record(const CudaReplayWork& work, cudaStream_t stream) {
  NIBBLE_RETURN_IF_ERROR(
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "recording"));
  work.issue();
  cudaGraph_t graph = nullptr;
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamEndCapture(stream, &graph), "recording"));
  return Graph(graph);
}

Result<int64_t> count_kernels(cudaGraph_t graph) {
  size_t count = 0;
  NIBBLE_RETURN_IF_ERROR(check(cudaGraphGetNodes(graph, nullptr, &count), "counting kernels"));
  std::vector<cudaGraphNode_t> nodes(count);
  NIBBLE_RETURN_IF_ERROR(check(cudaGraphGetNodes(graph, nodes.data(), &count), "counting kernels"));
  int64_t kernels = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    NIBBLE_RETURN_IF_ERROR(check(cudaGraphNodeGetType(node, &type), "counting kernels"));
    kernels += type == cudaGraphNodeTypeKernel ? 1 : 0;
  }
  return kernels;
}

/// Two events around work that the host issues.
class EventPair final {
 public:
  EventPair() = default;
  EventPair(const EventPair&) = delete;
  EventPair& operator=(const EventPair&) = delete;
  ~EventPair() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  Status make() {
    NIBBLE_RETURN_IF_ERROR(check(cudaEventCreate(&begin_), "making an event"));
    return check(cudaEventCreate(&end_), "making an event");
  }
  /// Microseconds.
  Result<double> time(const std::function<void()>& issue, cudaStream_t stream) {
    NIBBLE_RETURN_IF_ERROR(check(cudaEventRecord(begin_, stream), "timing"));
    issue();
    NIBBLE_RETURN_IF_ERROR(check(cudaEventRecord(end_, stream), "timing"));
    NIBBLE_RETURN_IF_ERROR(check(cudaEventSynchronize(end_), "running a benchmark"));
    float ms = 0.0F;
    NIBBLE_RETURN_IF_ERROR(check(cudaEventElapsedTime(&ms, begin_, end_), "timing"));
    return static_cast<double>(ms) * 1e3;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// What time() gives, `repeats` times, with rests.
template <typename Time>
Result<std::vector<double>> repeat(const CudaReplayWork& work, const Time& time) {
  std::vector<double> us;
  for (int64_t i = 0; i < work.repeats; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const double one, time());
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(work.rest * one));
    us.push_back(one);
  }
  return us;
}

}  // namespace

Result<CudaReplays> time_replays(int device, const CudaReplayWork& work, cudaStream_t stream) {
  NIBBLE_RETURN_IF_ERROR(check(cudaSetDevice(device), "choosing a GPU"));
  work.issue();  // loads kernels, and shows their errors where they are
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "running a benchmark"));
  NIBBLE_ASSIGN_OR_RETURN(const Graph graph, record(work, stream));
  CudaReplays replays;
  NIBBLE_ASSIGN_OR_RETURN(replays.kernels, count_kernels(graph.get()));
  if (!work.replays) {
    EventPair events;
    NIBBLE_RETURN_IF_ERROR(events.make());
    NIBBLE_ASSIGN_OR_RETURN(replays.us,
                            repeat(work, [&] { return events.time(work.issue, stream); }));
    return replays;
  }
  cudaGraphExec_t executable = nullptr;
  NIBBLE_RETURN_IF_ERROR(
      check(cudaGraphInstantiate(&executable, graph.get(), 0), "making a graph"));
  const Recording recording(executable);
  NIBBLE_ASSIGN_OR_RETURN(const auto timer, Timer::make());
  NIBBLE_RETURN_IF_ERROR(recording.launch(timer->stream()));
  NIBBLE_RETURN_IF_ERROR(timer->wait());
  NIBBLE_ASSIGN_OR_RETURN(replays.us, repeat(work, [&] { return timer->replay(recording); }));
  return replays;
}

}  // namespace nibble::cuda
