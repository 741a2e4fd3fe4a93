#include "bench/cuda/replay_bench.h"

#include <algorithm>
#include <chrono>
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

}  // namespace

Result<CudaReplays> time_replays(int device, const CudaReplayWork& work, cudaStream_t stream) {
  NIBBLE_RETURN_IF_ERROR(check(cudaSetDevice(device), "choosing a GPU"));
  work.issue();  // loads kernels, and shows their errors where they are
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "running a benchmark"));
  NIBBLE_ASSIGN_OR_RETURN(const Graph graph, record(work, stream));
  CudaReplays replays;
  NIBBLE_ASSIGN_OR_RETURN(replays.kernels, count_kernels(graph.get()));
  cudaGraphExec_t executable = nullptr;
  NIBBLE_RETURN_IF_ERROR(
      check(cudaGraphInstantiate(&executable, graph.get(), 0), "making a graph"));
  const Recording recording(executable);
  NIBBLE_ASSIGN_OR_RETURN(const auto timer, Timer::make());
  NIBBLE_RETURN_IF_ERROR(recording.launch(timer->stream()));
  NIBBLE_RETURN_IF_ERROR(timer->wait());
  for (int64_t i = 0; i < work.repeats; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const double us, timer->replay(recording));
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(work.rest * us));
    replays.us.push_back(us);
  }
  return replays;
}

}  // namespace nibble::cuda
