#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <vector>

#include "backend/cuda/latent.h"
#include "backend/cuda/self_check.h"
#include "backend/cuda/self_check_data.h"
#include "base/f16.h"
#include "ops/attention.h"
#include "ops/latent.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kLastPage = 36;  // tokens of the sequence in its second page
constexpr int32_t kCompared = 3;   // its last rows: two of the prefill and one of decode
constexpr int32_t kPages[] = {2, 0};
constexpr int32_t kPageCount = 3;
constexpr int32_t kRopeDim = 8;  // of rows of any size but that of the kernels of warpgroups
constexpr int32_t kFastDim = 576;
constexpr int32_t kFastRopeDim = 64;
constexpr double kTheta = 10000.0;
constexpr int32_t kMostHeads = 8;  // compared: all have the same latents
constexpr uint32_t kSeed = 23;

/// The sequence, its memory on the GPU, and what of it is one step's.
class LatentCheck final {
 public:
  LatentCheck(const LatentShape& shape, cudaStream_t stream)
      : shape_(shape),
        stream_(stream),
        tokens_(shape.page_size + kLastPage),
        rope_dim_(shape.coded()               ? shape.rope_dim
                  : shape.row_dim == kFastDim ? kFastRopeDim
                                              : kRopeDim),
        width_(static_cast<int64_t>(shape.heads) * shape.row_dim),
        rows_(
            random_bf16(static_cast<size_t>(tokens_) * static_cast<size_t>(shape.row_dim), kSeed)),
        queries_(random_bf16(static_cast<size_t>(tokens_ * width_), kSeed + 1)),
        norm_(static_cast<size_t>(shape.row_dim - rope_dim_), 1.0F) {
    const int32_t compared = std::min(shape.heads, kMostHeads);
    for (int32_t i = 0; i < compared; ++i) {  // the first and the last one are among them
      heads_.push_back(compared == 1 ? 0 : i * (shape.heads - 1) / (compared - 1));
    }
    for (int32_t i = 0; i < rope_dim_ / 2; ++i) {
      inv_freq_.push_back(static_cast<float>(std::pow(kTheta, -2.0 * i / rope_dim_)));
    }
  }

  Result<Difference> run() {
    NIBBLE_ASSIGN_OR_RETURN(device_rows_, device_copy(rows_));
    NIBBLE_ASSIGN_OR_RETURN(device_queries_, device_copy(queries_));
    NIBBLE_ASSIGN_OR_RETURN(device_norm_, device_copy(norm_));
    NIBBLE_ASSIGN_OR_RETURN(device_inv_freq_, device_copy(inv_freq_));
    NIBBLE_ASSIGN_OR_RETURN(out_, poisoned_device(static_cast<size_t>(tokens_ * width_) * 2));
    NIBBLE_ASSIGN_OR_RETURN(
        pages_, poisoned_device(static_cast<size_t>(latent_page_bytes(shape_) * kPageCount)));
    NIBBLE_ASSIGN_OR_RETURN(workspace_, poisoned_device(latent_workspace_bytes(shape_, 1) + 1));
    NIBBLE_RETURN_IF_ERROR(step(0, tokens_ - 1));
    NIBBLE_RETURN_IF_ERROR(step(tokens_ - 1, 1));
    const std::vector<float> want = reference();
    std::vector<uint16_t> got(static_cast<size_t>(kCompared * width_));
    NIBBLE_RETURN_IF_ERROR(
        copy_back(out_, static_cast<size_t>((tokens_ - kCompared) * width_), std::span(got)));
    Difference difference;
    auto wanted = want.begin();
    for (int64_t row = 0; row < kCompared; ++row) {
      for (const int32_t head : heads_) {
        const int64_t column = int64_t{head} * shape_.row_dim;
        for (int32_t i = 0; i < shape_.row_dim - rope_dim_; ++i) {
          difference.add(bf16_to_f32(got[static_cast<size_t>(row * width_ + column + i)]),
                         wanted[i], row, column + i);
        }
        wanted += shape_.row_dim;
      }
    }
    return difference;
  }

 private:
  /// Appends `rows` tokens from `first` on and attends for them.
  Status step(int32_t first, int32_t rows) {
    std::vector<int32_t> numbers = {0, rows, first + rows, kPages[0], kPages[1]};
    for (int32_t row = 0; row < rows; ++row) {
      numbers.push_back(first + row);
    }
    numbers.resize(numbers.size() + static_cast<size_t>(rows), 0);  // all of sequence 0
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer memory, device_copy(numbers));
    const auto* at = memory.as<int32_t>();
    const StepMetadata metadata{.q_begin = at,
                                .kv_len = at + 2,
                                .page_table = at + 3,
                                .page_table_stride = 2,
                                .row_position = at + 5,
                                .row_sequence = at + 5 + rows,
                                .sequences = 1,
                                .rows = rows};
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer plan,
                            poisoned_device(latent_plan_bytes(shape_, 1, rows) + 1));
    const LaunchContext context{.stream = stream_, .overlap = false};
    NIBBLE_RETURN_IF_ERROR(
        check(append_latent({.shape = shape_,
                             .step = metadata,
                             .pages = pages_.as<void>(),
                             .rows = device_rows_.as<uint16_t>() + first * shape_.row_dim,
                             .stride = shape_.row_dim,
                             .latent_norm = device_norm_.as<float>(),
                             .turn = {.inv_freq = device_inv_freq_.as<float>(), .dim = rope_dim_}},
                            context),
              "appending latents"));
    NIBBLE_RETURN_IF_ERROR(
        check(plan_latent(shape_, metadata, plan.as<void>(), context), "attention plan"));
    const LatentLaunch launch{.shape = shape_,
                              .step = metadata,
                              .plan = plan.as<void>(),
                              .pages = pages_.as<void>(),
                              .q = device_queries_.as<uint16_t>() + first * width_,
                              .q_stride = width_,
                              .out = out_.as<uint16_t>() + first * width_,
                              .out_stride = width_,
                              .workspace = workspace_.as<void>()};
    NIBBLE_RETURN_IF_ERROR(check(decode_latent(launch, context), "attention"));
    if (rows > 1) {
      NIBBLE_RETURN_IF_ERROR(check(prefill_latent(launch, context), "attention"));
    }
    return check(cudaStreamSynchronize(stream_), "attention");
  }

  /// [kCompared, heads_, row_dim], over rows in F32.
  [[nodiscard]] std::vector<float> reference() const {
    std::vector<float> rows(rows_.size());
    std::ranges::transform(rows_, rows.begin(), bf16_to_f32);
    std::vector<float> queries;
    for (auto row = queries_.end() - kCompared * width_; row != queries_.end(); row += width_) {
      for (const int32_t head : heads_) {
        const auto query = row + int64_t{head} * shape_.row_dim;
        std::transform(query, query + shape_.row_dim, std::back_inserter(queries), bf16_to_f32);
      }
    }
    KvView kv{.code = KvCode::kF32,
              .page_size = shape_.page_size,
              .kv_heads = 1,
              .head_dim = shape_.row_dim,
              .latent_rank = shape_.row_dim - rope_dim_};
    std::vector<std::byte> pages(static_cast<size_t>(kv.page_bytes() * kPageCount));
    kv.pages = pages.data();
    SequenceSpan span{.q_begin = 0, .q_len = tokens_, .kv_len = tokens_, .pages = kPages};
    reference_latent_append({.rows = rows.data(),
                             .stride = shape_.row_dim,
                             .latent_norm = norm_.data(),
                             .rope = {.inv_freq = inv_freq_.data(), .dim = rope_dim_},
                             .kv = kv,
                             .sequences = {&span, 1}});
    span.q_len = kCompared;
    std::vector<float> out(queries.size());
    const int64_t stride = std::ssize(heads_) * shape_.row_dim;
    reference_attention({.q = queries.data(),
                         .q_stride = stride,
                         .out = out.data(),
                         .out_stride = stride,
                         .heads = std::ssize(heads_),
                         .scale = shape_.scale,
                         .kv = kv,
                         .sequences = {&span, 1}});
    return out;
  }

  const LatentShape shape_;
  cudaStream_t stream_;
  const int32_t tokens_;
  const int32_t rope_dim_;
  const int64_t width_;
  std::vector<int32_t> heads_;     // that are compared
  std::vector<uint16_t> rows_;     // [tokens, row_dim] before norm and rotation
  std::vector<uint16_t> queries_;  // [tokens, heads, row_dim]
  std::vector<float> norm_;
  std::vector<float> inv_freq_;
  DeviceBuffer device_rows_, device_queries_, device_norm_, device_inv_freq_, out_, pages_,
      workspace_;
};

}  // namespace

Status SelfCheck::check_latent(const LatentShape& shape) {
  const auto start = std::chrono::steady_clock::now();
  if (!latents_.insert({shape.code, shape.page_size, shape.row_dim, shape.heads}).second) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Difference difference, LatentCheck(shape, stream_).run());
  const double tolerance = kv_format(shape.code).tolerance;
  if (!difference.within(tolerance)) {
    return make_error(
        StatusCode::kUnavailable,
        "self-test: latent attention of {} heads over rows of {} in {} is wrong on this GPU ({}): "
        "it "
        "differs from the reference by {:.2g} of its size ({:.2g} is allowed), most at output {}: "
        "{:.6g} instead of {:.6g}; use --device cpu, and report it",
        shape.heads, shape.row_dim, kv_code_name(shape.code),
        difference.row == kCompared - 1 ? "decode" : "prefill", difference.relative(), tolerance,
        difference.column, difference.got, difference.want);
  }
  finish("latent attention", start);
  return {};
}

}  // namespace nibble::cuda
