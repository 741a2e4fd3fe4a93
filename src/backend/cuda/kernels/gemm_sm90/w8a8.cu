// y [m, n] = x [m, k] · w [n, k]ᵀ, both int8 (summed exactly in int32) or both E4M3 (summed by the
// tensor cores, which keep about 14 bits of a running sum), with one scale for each channel and
// each token.

#include "backend/cuda/kernels/gemm_sm90/bytes.cuh"

namespace nibble::cuda {
namespace {

constexpr GemmSm90Family kInt8Family{.name = "gemm_w8a8_int8_sm90",
                                     .tiles = kByteTiles<ptx::MmaType::kInt8>,
                                     .unit_bytes = 4 * kByteUnitWords,
                                     .block_elements = 128,
                                     .depth = BytePacking::kDepth,
                                     .pack = pack_units<BytePacking>,
                                     .unpack = unpack_units<BytePacking>,
                                     .grouped = kGroupedByteTiles<ptx::MmaType::kInt8>};
constexpr GemmSm90Family kFp8Family{.name = "gemm_w8a8_fp8_sm90",
                                    .tiles = kByteTiles<ptx::MmaType::kE4M3>,
                                    .unit_bytes = 4 * kByteUnitWords,
                                    .block_elements = 128,
                                    .depth = BytePacking::kDepth,
                                    .pack = pack_units<BytePacking>,
                                    .unpack = unpack_units<BytePacking>,
                                    .grouped = kGroupedByteTiles<ptx::MmaType::kE4M3>};

bool accepts_int8(const GemmProblem& problem, const DeviceInfo& device) {
  return scaled_by_channel_and_token(problem, device, WeightCode::kInt8, ActFormat::kInt8Token);
}
bool accepts_fp8(const GemmProblem& problem, const DeviceInfo& device) {
  return scaled_by_channel_and_token(problem, device, WeightCode::kFp8E4M3, ActFormat::kFp8Token);
}

Result<std::unique_ptr<GemmKernel>> make_int8(const GemmProblem& problem,
                                              const DeviceInfo& device) {
  return GemmSm90::make(kInt8Family, problem, device);
}
Result<std::unique_ptr<GemmKernel>> make_fp8(const GemmProblem& problem, const DeviceInfo& device) {
  return GemmSm90::make(kFp8Family, problem, device);
}

}  // namespace

const GemmEntry kGemmW8A8Int8Sm90{
    .name = kInt8Family.name, .accepts = accepts_int8, .make = make_int8, .grouped = true};
const GemmEntry kGemmW8A8Fp8Sm90{
    .name = kFp8Family.name, .accepts = accepts_fp8, .make = make_fp8, .grouped = true};

}  // namespace nibble::cuda
