#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/scratch.h"
#include "backend/step.h"

namespace nibble::cuda {

class CublasLt;

/// Branches of steps (Step::begin_branch()): a second stream, with scratch memory of its own for
/// the products on it. Two events order the streams, where a step is recorded, too:
///   begin()  the branch waits for what the main stream has been given so far
///   end()    what follows is the main stream's again, which does not wait
///   join()   the main stream waits for the branch
/// The kernel behind such a wait is launched without overlap: programmatic dependent launch is for
/// a kernel and its predecessor on the same stream, and this one has none there, or two.
class StepBranch final {
 public:
  /// kOneStream: all on the main stream, one behind the other, to compare with.
  enum class Place : uint8_t { kBeside, kOneStream };

  /// The most rows of a step that has branches. More of them leave no multiprocessor without work.
  static constexpr int64_t kMostRows = 64;

  StepBranch(const DeviceInfo& device, cudaStream_t main, Place place)
      : device_(device), main_(main), place_(place) {}
  StepBranch(const StepBranch&) = delete;
  StepBranch& operator=(const StepBranch&) = delete;
  /// Nothing may run.
  ~StepBranch();

  /// Makes room for products of a kernel with up to max_m rows, as far as steps have branches.
  Status reserve(const GemmKernel& kernel, const GemmProblem& problem, int64_t max_m);
  /// Bytes of that in steps of these sizes, nearly.
  [[nodiscard]] static int64_t bytes(const StepLimits& limits);

  /// Whether steps of so many rows have branches: where products for them are prepared.
  [[nodiscard]] bool takes(int64_t rows) const { return prepared_ && rows <= kMostRows; }
  /// F32 numbers for what a branch computes.
  [[nodiscard]] const DeviceBuffer& results() const { return results_; }

  /// A new step: no branch of an earlier one, which may have failed, goes on.
  void reset() { state_ = State::kNone; }
  void begin();
  void end();
  /// How the kernel that reads the branch's results is launched, next, on the main stream.
  [[nodiscard]] LaunchContext join();

  /// Between begin() and end(), and between end() and join().
  [[nodiscard]] bool open() const { return state_ == State::kOpen; }
  [[nodiscard]] bool ended() const { return state_ == State::kEnded; }
  /// Whether kernels of an ended branch may run beside those of the main stream.
  [[nodiscard]] bool runs_beside() const { return ended() && place_ == Place::kBeside; }

  /// Of an open branch: how its next kernel is launched, which is launched then.
  [[nodiscard]] LaunchContext next();
  [[nodiscard]] const GemmScratch& scratch() const { return scratch_; }

 private:
  enum class State : uint8_t { kNone, kOpen, kEnded };
  struct StreamDeleter {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  };
  using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, StreamDeleter>;

  Status start();

  const DeviceInfo& device_;
  cudaStream_t main_;
  Place place_;
  State state_ = State::kNone;
  bool behind_event_ = false;  // its next kernel is the first
  bool prepared_ = false;
  Stream stream_;
  Event begun_;
  Event ended_;
  std::shared_ptr<CublasLt> library_;  // which has a workspace for the stream; null: not there
  GemmScratch scratch_;
  DeviceBuffer results_;
};

}  // namespace nibble::cuda
