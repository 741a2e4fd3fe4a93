#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <cuda_runtime_api.h>

#include "backend/backend.h"
#include "backend/cuda/attention.h"
#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/latent.h"

namespace nibble::cuda {

/// Checks, while a model is loaded, that the kernels that are going to serve it are right on this
/// GPU: against the plain references of ops/ in double precision, on the model's own weights, once
/// for each kind of layer. What differs is refused: kUnavailable names the kernel, the tensor and
/// the difference. Calls wait for the stream; what they allocate is free again afterwards.
class SelfCheck final {
 public:
  explicit SelfCheck(cudaStream_t stream) : stream_(stream) {}

  /// Random rows of activations times `gemm`, which holds `parts`, one number of rows up to
  /// `most_rows` for each of its kernels (CudaGemm::row_counts): outputs of the last row at both
  /// ends and in the middle of the matrix beside reference_gemm() on the rows of `parts`, which
  /// come from the file and not from the packed memory. Then the norm and the SiLU of such rows.
  /// Done for the first matrix of each kernel, format, shape and last part of the tensor's name.
  Status check_product(CudaGemm& gemm,
                       std::span<const QuantView> parts,
                       const ActSpec& act,
                       int64_t most_rows);

  /// A random sequence on a cache of its own: rotated, appended, attended to by prefill and by
  /// decode, beside reference_attention() over an F32 cache. shape.scale must be
  /// 1 / sqrt(head_dim); done once for each shape. A window wider than the sequence hides nothing.
  Status check_attention(const AttentionShape& shape);

  /// The same for latent attention, beside reference_latent_append() too.
  Status check_latent(const LatentShape& shape);

  /// Prefill of latent attention in its expanded form over random keys and values, in two pieces.
  Status check_expanded(const LatentShape& shape);

  /// The SiLU of random rows [k], turned (GemmInput::turn), in BF16 and INT8.
  Status check_turned(int64_t turn, int64_t k);

  /// The largest of random logits [vocab], and one that is drawn, beside sums in double precision.
  Status check_sampling(int64_t vocab);

  [[nodiscard]] int64_t checks() const { return checks_; }
  [[nodiscard]] double milliseconds() const { return milliseconds_; }

 private:
  Status check_rows(ActFormat act, int64_t n);
  Status check_block_rows(const ActSpec& act, const WeightFormat& weight, int64_t n);
  /// Counts a check that began at `start`, and its time.
  void finish(std::string_view what, std::chrono::steady_clock::time_point start);
  /// Adds the time since `start` to that of all checks, and logs it.
  void add_time(std::string_view what, std::chrono::steady_clock::time_point start);

  cudaStream_t stream_;
  std::set<std::tuple<std::string, int64_t, int64_t, int, int>> products_;
  std::set<std::tuple<int, int, int64_t, int64_t, int64_t, int64_t, int>> attentions_;
  std::set<std::tuple<KvCode, int32_t, int32_t, int32_t>> latents_;
  std::set<std::pair<int32_t, int32_t>> expanded_;
  std::set<std::pair<ActFormat, int64_t>> rows_;
  std::set<std::pair<int64_t, int64_t>> turned_;
  int64_t checks_ = 0;
  double milliseconds_ = 0;
};

/// ‖y − reference‖ / ‖reference‖ that results of a product may have in F32: what its tests allow.
[[nodiscard]] double product_tolerance(const WeightFormat& weight, ActFormat act);

}  // namespace nibble::cuda
