// Frequencies of each row under dynamic NTK scaling (ops/dynamic_rope.h), once per step: what
// rotates the rows then finds them as it finds a model's own.

#include "backend/cuda/attention.h"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

struct RowFrequencyArgs {
  const int32_t* prompt_len;
  const int32_t* row_position;
  const int32_t* row_sequence;
  DynamicRope dynamic;
  const float* inv_freq;
  float* out;
};

__global__ void row_frequencies_kernel(const RowFrequencyArgs args) {
  ptx::wait_for_predecessor();
  const int row = static_cast<int>(blockIdx.x);
  const int pair = static_cast<int>(threadIdx.x);
  const int pairs = static_cast<int>(blockDim.x);
  const int32_t sequence = args.row_sequence[row];
  const int64_t prompt = sequence < 0 ? 0 : args.prompt_len[sequence];
  const double growth = base_growth(args.dynamic, rotated_length(prompt, args.row_position[row]));
  float frequency = args.inv_freq[pair];
  if (growth != 1.0) {
    frequency = static_cast<float>(frequency * pow(growth, growth_exponent(pair, 2 * pairs)));
  }
  args.out[static_cast<int64_t>(row) * pairs + pair] = frequency;
}

}  // namespace

cudaError_t row_frequencies(const RowFrequencyLaunch& args, const LaunchContext& context) {
  const RowFrequencyArgs out{.prompt_len = args.step.prompt_len,
                             .row_position = args.step.row_position,
                             .row_sequence = args.step.row_sequence,
                             .dynamic = args.dynamic,
                             .inv_freq = args.inv_freq,
                             .out = args.out};
  const Grid grid{dim3(static_cast<unsigned>(args.step.rows)),
                  static_cast<unsigned>(args.head_dim / 2), 0};
  return launch(row_frequencies_kernel, grid, context, out);
}

}  // namespace nibble::cuda
