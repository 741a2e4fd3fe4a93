#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "backend/cuda/forwarding_gemm.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/testing/faulty_gemm.h"
#include "base/check.h"

namespace nibble::cuda::testing {
namespace {

constexpr size_t kMostFamilies = 32;
constexpr size_t kDamagedBytes = 4096;
constexpr std::string_view kFamilyOfFewRows = "gemm_w4a16_";
constexpr int64_t kFewRows[] = {9, 16};
constexpr size_t kZeroBytes = 64;

Fault fault_in_force = Fault::kNone;
uint32_t runs_before_trap = 0;

__device__ uint32_t runs_so_far = 0;

__global__ void count_and_trap(uint32_t limit) {
  if (atomicAdd(&runs_so_far, 1U) >= limit) {
    __trap();
  }
}

/// A kernel of a real family that is not what it seems.
class FaultyGemm final : public ForwardingGemm {
 public:
  FaultyGemm(std::unique_ptr<GemmKernel> kernel, std::string_view family)
      : ForwardingGemm(std::move(kernel)), family_(family) {}
  // Only what is packed can be damaged.
  [[nodiscard]] bool packs_nothing() const override {
    return fault_in_force != Fault::kDamagedWeights && ForwardingGemm::packs_nothing();
  }
  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override {
    const cudaError_t error = ForwardingGemm::pack(codes, scales, packed, stream);
    if (error != cudaSuccess || fault_in_force != Fault::kDamagedWeights) {
      return error;
    }
    return cudaMemsetAsync(packed, 0x25, std::min(kDamagedBytes, packed_bytes()), stream);
  }
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    if (fault_in_force == Fault::kTrap) {
      const LaunchContext apart{.stream = context.stream, .overlap = false};
      const cudaError_t error =
          launch(count_and_trap, {.blocks = {1, 1, 1}, .threads = 1}, apart, runs_before_trap);
      if (error != cudaSuccess) {
        return error;
      }
      return kernel().run(args, apart);
    }
    const cudaError_t error = kernel().run(args, context);
    if (error != cudaSuccess || fault_in_force != Fault::kWrongFewRows || args.m < kFewRows[0] ||
        args.m > kFewRows[1] || !family_.starts_with(kFamilyOfFewRows)) {
      return error;
    }
    const int64_t bytes = args.result == GemmResult::kBf16 ? 2 : 4;
    auto* last = static_cast<uint8_t*>(args.y) + (args.m - 1) * args.y_stride * bytes;
    return cudaMemsetAsync(last, 0, kZeroBytes, context.stream);
  }

 private:
  std::string_view family_;
};

template <size_t Index>
bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return gemm_entries()[Index].accepts(problem, device);
}

template <size_t Index>
Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(auto kernel, gemm_entries()[Index].make(problem, device));
  return std::unique_ptr<GemmKernel>(
      std::make_unique<FaultyGemm>(std::move(kernel), gemm_entries()[Index].name));
}

template <size_t... Index>
std::array<GemmEntry, kMostFamilies> wrap(std::index_sequence<Index...>) {
  const auto families = gemm_entries();
  return {GemmEntry{Index < families.size() ? families[Index].name : "", accepts<Index>,
                    make<Index>}...};
}

}  // namespace

std::span<const GemmEntry> faulty_gemms(Fault fault, uint32_t runs) {
  CHECK_LE(gemm_entries().size(), kMostFamilies);
  static const std::array<GemmEntry, kMostFamilies> kEntries =
      wrap(std::make_index_sequence<kMostFamilies>());
  fault_in_force = fault;
  runs_before_trap = runs;
  return std::span(kEntries).first(gemm_entries().size());
}

}  // namespace nibble::cuda::testing
