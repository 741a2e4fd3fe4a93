#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/launch.h"
#include "ops/sampling.h"

namespace nibble::cuda {

using nibble::kMaxTopLogprobs;
using nibble::LogitEdit;
using nibble::RowSampling;
using nibble::SampleStatus;
using nibble::TopLogprob;

/// What the rows of a call may ask for. kGreedy (no temperature) saves a launch.
enum class SampleRange : uint8_t { kGreedy, kAny };

/// Samples a token from every row of logits. All pointers are device memory.
///   logits [rows, vocab] f32, rows `stride` elements apart; overwritten
///   sampling [rows]
///   edits [edit_count[0]] (at most max_edits), no two for the same row and token; or none
///   mask_of [rows]: which of masks [n, ceil(vocab / 32)] says what the row may sample (bit token %
///   32 of word token / 32), -1: all; both or none
///   tokens [rows]: -1 unless the status is kOk     status [rows]
///   next [rows]: the tokens once more, or none
///   logprobs [rows], top [rows, kMaxTopLogprobs]: written for rows with logprobs >= 0; both or
///   none workspace: sample_workspace_bytes(), 8-byte aligned, zero before the first run, left zero
///
/// The order and the meaning of all steps are those of ops/sampler.h, and the same seed and step
/// draw the same number. Weights are summed as integers, in steps of 2^-44 of the largest: the sums
/// are exact, so a row's sample depends neither on its neighbours nor on the order of threads. It
/// differs from the CPU's where the draw lies within the rounding of exp() of a boundary, about
/// once in a million draws. Log-probabilities agree to 1e-5.
struct SampleArgs {
  SampleRange range = SampleRange::kAny;
  float* logits = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t vocab = 0;
  const RowSampling* sampling = nullptr;
  const LogitEdit* edits = nullptr;
  const int32_t* edit_count = nullptr;
  int64_t max_edits = 0;
  const int32_t* mask_of = nullptr;
  const uint32_t* masks = nullptr;
  int32_t* tokens = nullptr;
  int32_t* next = nullptr;
  SampleStatus* status = nullptr;
  float* logprobs = nullptr;
  TopLogprob* top = nullptr;
  void* workspace = nullptr;
  int64_t max_rows = 0;  // that the workspace was made for
};

[[nodiscard]] size_t sample_workspace_bytes(int64_t max_rows, int64_t max_edits);

/// Stream-ordered; allocates nothing; three launches, two for kGreedy, one more with edits, one
/// with masks and one with logprobs. cudaErrorInvalidValue for a vocabulary above 2^19 or below 1
/// and for more than 65535 rows.
cudaError_t sample_tokens(const SampleArgs& args, const LaunchContext& context);

}  // namespace nibble::cuda
