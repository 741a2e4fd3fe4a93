// y [m, n] = x [m, k] bf16 · (w [n, k] bf16)ᵀ, summed in f32: the experts of a layer, and what a
// dense layer multiplies before and behind attention. Of few rows such products are quicker than by
// cuBLASLt, also as their weights are on their way before the kernel in front has ended.

#include "backend/cuda/kernels/gemm_sm90/bytes.cuh"

namespace nibble::cuda {
namespace {

// A weight is two columns of bytes.
cudaError_t pack(const void* codes, int64_t n, int64_t k, void* units, cudaStream_t stream) {
  return pack_units<BytePacking>(codes, n, 2 * k, units, stream);
}
cudaError_t unpack(const void* units, int64_t n, int64_t k, void* codes, cudaStream_t stream) {
  return unpack_units<BytePacking>(units, n, 2 * k, codes, stream);
}

using Codec = ByteCodec<ptx::MmaType::kBf16>;

constexpr GemmSm90Family kFamily{.name = "gemm_bf16_sm90",
                                 .tiles = kByteTiles<ptx::MmaType::kBf16>,
                                 .unit_bytes = Codec::kUnitBytes,
                                 .block_elements = Codec::kBlockElements,
                                 .depth = BytePacking::kDepth,
                                 .pack = pack,
                                 .unpack = unpack,
                                 .row_scales = Codec::kRowScales,
                                 .grouped = kGroupedByteTiles<ptx::MmaType::kBf16>};

// An H200, times cuBLASLt (bench kernels): 2880 x 4096 1.3 at 1 to 8 rows, 1.2 at 16, 0.98 at 64,
// 0.96 at 4096; 6144 x 4096 1.12, 1.11, 1.03. Larger matrices gain less with few rows (14336 x 4096
// 1.07; 7168 x 8192 1.01, and 1.14 in a step, where it begins before what is in front has ended)
// and lose as much with many; with longer rows they lose with few, too (4096 x 14336 0.86 at 1
// row). An output head may be the table of embeddings as it is.
constexpr int64_t kMostWeights = int64_t{1} << 26;
constexpr int64_t kMostOfLongRows = int64_t{1} << 25;  // of rows of any length
constexpr int64_t kMostColumns = 8192;                 // of more
constexpr int64_t kMostRows = int64_t{1} << 14;

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const int64_t weights = problem.n * problem.k;
  const bool small =
      weights <= kMostOfLongRows || (weights <= kMostWeights && problem.k <= kMostColumns);
  const bool worth = problem.experts > 0 || (problem.n <= kMostRows && small);
  return worth && device.hopper() && problem.weight.code == WeightCode::kBf16 &&
         !problem.weight.quantized() && problem.act == ActFormat::kBf16 && problem.n >= 1 &&
         problem.k >= 64 && problem.k % 64 == 0;
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return GemmSm90::make(kFamily, problem, device);
}

}  // namespace

const GemmEntry kGemmBf16Sm90{
    .name = kFamily.name, .accepts = accepts, .make = make, .grouped = true};

}  // namespace nibble::cuda
