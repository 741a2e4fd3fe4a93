#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/cuda/latent.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda::testing {

inline constexpr int32_t kFastDim = 576;      // of rows whose kernels multiply in warpgroups
inline constexpr int32_t kFastValues = 512;   // of which are values
inline constexpr int32_t kLatentGroup = 128;  // numbers of a latent in int4 that share a line

/// A sequence of a step: its last q_len tokens are the step's.
struct LatentSequence {
  int32_t q_len;
  int32_t kv_len;
};

/// Random numbers of bf16.
std::vector<float> bf16_values(size_t count, uint32_t seed);
std::vector<uint16_t> bf16_bits(const std::vector<float>& values);

/// Rows in bf16.
LatentShape latent_shape(int32_t heads, int32_t row_dim = kFastDim, int32_t page_size = 64);
/// Rows in codes.
LatentShape coded_shape(KvCode code,
                        int32_t heads,
                        int32_t rank = kFastValues,
                        int32_t page_size = 64);
/// One row of each of eight sequences, of one token and more.
std::vector<LatentSequence> decode_lengths();

/// One step: random rows in scattered pages on the GPU, whose other memory is NaNs, and the same on
/// the host.
class LatentCase {
 public:
  LatentCase(const LatentShape& shape, std::vector<LatentSequence> sequences);

  [[nodiscard]] size_t width() const;
  [[nodiscard]] const StepMetadata& step() const { return step_; }
  [[nodiscard]] DeviceArray<uint8_t>& pages() { return *pages_; }
  [[nodiscard]] int32_t page(int32_t sequence, int32_t index) const;

  /// Other lengths in the same device arrays.
  void change_lengths(const std::vector<int32_t>& lengths);

  void launch(cudaStream_t stream, bool overlap);

  /// The output, over poisoned memory.
  std::vector<uint16_t> run(bool overlap);
  [[nodiscard]] std::vector<uint16_t> output() const { return out_->host(); }

  /// Compares an output with sums in double precision, head by head.
  void check(const std::vector<uint16_t>& output) const;

  LatentShape shape;
  std::vector<float> queries;

 private:
  /// Random rows at the places of their tokens, and the same in F32 for the reference.
  void fill_pages(size_t count);

  /// Stores a row of bf16 numbers in a page; of coded rows the latent becomes what codes make. Rows
  /// of different tokens have scales of different size, and some are zeros.
  void store_row(std::span<float> row, int32_t slot, uint8_t* page);

  /// Codes of 4 bits; the groups of a row have lines of different size.
  void store_groups(std::span<float> row, float size, int32_t slot, uint8_t* page) const;

  void make_step();

  [[nodiscard]] std::vector<float> expected() const;

  std::vector<LatentSequence> sequences_;
  int32_t stride_ = 0;  // pages of a sequence in the table
  std::vector<int32_t> table_;
  std::vector<float> host_pages_;
  size_t rows_stored_ = 0;
  StepMetadata step_;
  std::unique_ptr<DeviceArray<int32_t>> q_begin_, kv_len_, position_, owner_, device_table_;
  std::unique_ptr<DeviceArray<uint16_t>> device_queries_, out_;
  std::unique_ptr<DeviceArray<uint8_t>> pages_, plan_, workspace_;
};

/// Runs a case twice and compares it with the reference.
void check_case(const LatentShape& shape, const std::vector<LatentSequence>& sequences);

}  // namespace nibble::cuda::testing
