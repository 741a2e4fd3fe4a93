#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <vector>

#include "backend/cuda/expanded_plan.h"
#include "backend/cuda/self_check.h"
#include "backend/cuda/self_check_data.h"
#include "backend/cuda/tensor_map.h"
#include "base/f16.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kRowDim = kExpandedRank + kExpandedRope;
constexpr int32_t kQueryDim = kExpandedNope + kExpandedRope;
constexpr int32_t kTokens = 300;  // of the sequence, in two pieces
constexpr int32_t kPiece = 256;
constexpr int32_t kRows = 140;                     // its last ones, which are attended for
constexpr int32_t kCompared[] = {0, 95, 96, 139};  // the second piece begins with row 96's token
constexpr int32_t kMostHeads = 3;
constexpr double kTolerance = 0.02;
constexpr uint32_t kSeed = 29;
// Numbers of random_bf16() are about 1.2: scores of about as much as those of a model.
constexpr float kScale = 0.03F;

/// A sequence whose keys and values are random, its memory on the GPU, and what it leaves there.
/// Its cache is in bf16, whatever the model's.
class ExpandedCheck final {
 public:
  ExpandedCheck(const LatentShape& shape, cudaStream_t stream)
      : shape_{.page_size = shape.page_size, .row_dim = kRowDim, .rope_dim = kExpandedRope},
        stream_(stream),
        heads_(std::min(shape.heads, kMostHeads)),
        cached_(random_bf16(size_t{kTokens} * kRowDim, kSeed)),
        keys_(random_bf16(tokens_of(kExpandedNope), kSeed + 1)),
        values_(random_bf16(tokens_of(kExpandedValue), kSeed + 2)),
        q_(random_bf16(rows_of(kQueryDim), kSeed + 3)),
        rotated_(random_bf16(rows_of(kRowDim), kSeed + 4)) {}

  Result<Difference> run() {
    NIBBLE_ASSIGN_OR_RETURN(const TensorMaps maps, TensorMaps::find());
    NIBBLE_RETURN_IF_ERROR(upload());
    const ExpandedSequence sequence{.rows = kRows, .kv_len = kTokens};
    for (const ExpandedPiece& piece : cut_into_pieces({&sequence, 1}, kPiece)) {
      NIBBLE_RETURN_IF_ERROR(attend(piece, maps));
    }
    std::vector<uint16_t> got(rows_of(kExpandedValue));
    NIBBLE_RETURN_IF_ERROR(copy_back(out_, 0, std::span(got)));
    Difference difference;
    for (const int32_t row : kCompared) {
      for (int32_t head = 0; head < heads_; ++head) {
        const std::vector<double> want = expected(row, head);
        for (size_t i = 0; i < want.size(); ++i) {
          const size_t at = static_cast<size_t>(row * heads_ + head) * kExpandedValue + i;
          difference.add(bf16_to_f32(got[at]), want[i], row, head * kExpandedValue + int64_t(i));
        }
      }
    }
    return difference;
  }

 private:
  [[nodiscard]] size_t tokens_of(int32_t numbers) const {
    return size_t{kTokens} * static_cast<size_t>(heads_ * numbers);
  }
  [[nodiscard]] size_t rows_of(int32_t numbers) const {
    return size_t{kRows} * static_cast<size_t>(heads_ * numbers);
  }

  Status upload() {
    const int32_t pages = (kTokens + shape_.page_size - 1) / shape_.page_size;
    const auto page_numbers = static_cast<size_t>(latent_page_bytes(shape_)) / 2;
    std::vector<uint16_t> memory(static_cast<size_t>(pages) * page_numbers, 0xffff);
    std::vector<int32_t> table(static_cast<size_t>(pages));
    std::iota(table.rbegin(), table.rend(), 0);
    for (int32_t token = 0; token < kTokens; ++token) {
      const auto page = static_cast<size_t>(table[static_cast<size_t>(token / shape_.page_size)]);
      for (int32_t dim = 0; dim < kRowDim; ++dim) {
        const int32_t at = latent_offset(kRowDim, token % shape_.page_size, dim);
        memory[page * page_numbers + static_cast<size_t>(at) / 2] =
            cached_[static_cast<size_t>(token) * kRowDim + static_cast<size_t>(dim)];
      }
    }
    NIBBLE_ASSIGN_OR_RETURN(pages_, device_copy(memory));
    NIBBLE_ASSIGN_OR_RETURN(table_, device_copy(table));
    NIBBLE_ASSIGN_OR_RETURN(device_q_, device_copy(q_));
    NIBBLE_ASSIGN_OR_RETURN(device_rotated_, device_copy(rotated_));
    NIBBLE_ASSIGN_OR_RETURN(state_, poisoned_device(rows_of(kRowDim) * 2));
    NIBBLE_ASSIGN_OR_RETURN(out_, poisoned_device(rows_of(kExpandedValue) * 2));
    NIBBLE_ASSIGN_OR_RETURN(latents_, poisoned_device(size_t{kPiece} * kExpandedRank * 2));
    NIBBLE_ASSIGN_OR_RETURN(ropes_, poisoned_device(size_t{kPiece} * kExpandedRope * 2));
    return {};
  }

  /// The piece's tokens of [kTokens, heads, 128], with zeros behind them.
  [[nodiscard]] Result<DeviceBuffer> piece_of(const std::vector<uint16_t>& all,
                                              const ExpandedSegment& segment) const {
    const size_t width = static_cast<size_t>(heads_) * kExpandedNope;
    std::vector<uint16_t> rows(size_t{kPiece} * width, 0);
    std::copy_n(all.begin() + int64_t{segment.first_token} * static_cast<int64_t>(width),
                static_cast<size_t>(segment.tokens) * width, rows.begin());
    return device_copy(rows);
  }

  Status attend(const ExpandedPiece& piece, const TensorMaps& tensor_maps) {
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer keys, piece_of(keys_, piece.segments[0]));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer values, piece_of(values_, piece.segments[0]));
    ExpandedMaps maps;
    const auto map = [&](const DeviceBuffer& memory, int64_t columns, int panels, CUtensorMap& to) {
      return tensor_maps.map_bf16(memory.as<void>(), kPiece, columns, kExpandedTile, panels, to);
    };
    if (!map(keys, heads_ * kExpandedNope, 2, maps.keys) ||
        !map(ropes_, kExpandedRope, 1, maps.rotated) ||
        !map(values, heads_ * kExpandedValue, 2, maps.values)) {
      return make_error(StatusCode::kUnavailable,
                        "self-test: the driver makes no tensor map; use --device cpu");
    }
    const LaunchContext context{.stream = stream_, .overlap = false};
    const StepMetadata step{.page_table = table_.as<int32_t>(), .sequences = 1, .rows = kRows};
    NIBBLE_RETURN_IF_ERROR(check(gather_latents({.shape = shape_,
                                                 .step = step,
                                                 .piece = &piece,
                                                 .pages = pages_.as<void>(),
                                                 .latents = latents_.as<void>(),
                                                 .rotated = ropes_.as<void>()},
                                                context),
                                 "gathering latents"));
    NIBBLE_RETURN_IF_ERROR(check(attend_expanded({.piece = &piece,
                                                  .maps = &maps,
                                                  .heads = heads_,
                                                  .scale = kScale,
                                                  .q = device_q_.as<void>(),
                                                  .q_stride = int64_t{heads_} * kQueryDim,
                                                  .rotated = device_rotated_.as<void>(),
                                                  .state = state_.as<void>(),
                                                  .row_dim = kRowDim,
                                                  .out = out_.as<void>()},
                                                 context),
                                 "attention"));
    return check(cudaStreamSynchronize(stream_), "attention");
  }

  /// A result in double precision.
  [[nodiscard]] std::vector<double> expected(int32_t row, int32_t head) const {
    const auto heads = static_cast<size_t>(heads_);
    const size_t query = static_cast<size_t>(row) * heads + static_cast<size_t>(head);
    const auto at = [](const std::vector<uint16_t>& numbers, size_t row, size_t width, int32_t i) {
      return static_cast<double>(bf16_to_f32(numbers[row * width + static_cast<size_t>(i)]));
    };
    std::vector<double> sums(kExpandedValue, 0.0);
    double total = 0.0;
    for (int32_t token = 0; token <= kTokens - kRows + row; ++token) {
      const size_t key = static_cast<size_t>(token) * heads + static_cast<size_t>(head);
      double score = 0.0;
      for (int32_t i = 0; i < kExpandedNope; ++i) {
        score += at(q_, query, kQueryDim, i) * at(keys_, key, kExpandedNope, i);
      }
      for (int32_t i = kExpandedRank; i < kRowDim; ++i) {
        score +=
            at(rotated_, query, kRowDim, i) * at(cached_, static_cast<size_t>(token), kRowDim, i);
      }
      const double weight = std::exp(score * kScale);
      total += weight;
      for (int32_t i = 0; i < kExpandedValue; ++i) {
        sums[static_cast<size_t>(i)] += weight * at(values_, key, kExpandedValue, i);
      }
    }
    for (double& sum : sums) {
      sum /= total;
    }
    return sums;
  }

  const LatentShape shape_;
  cudaStream_t stream_;
  const int32_t heads_;
  std::vector<uint16_t> cached_;         // [kTokens, kRowDim]
  std::vector<uint16_t> keys_, values_;  // [kTokens, heads, 128]
  std::vector<uint16_t> q_, rotated_;    // [kRows, heads, ...]
  DeviceBuffer pages_, table_, device_q_, device_rotated_, state_, out_, latents_, ropes_;
};

}  // namespace

Status SelfCheck::check_expanded(const LatentShape& shape) {
  const auto start = std::chrono::steady_clock::now();
  if (!expanded_.insert({shape.page_size, std::min(shape.heads, kMostHeads)}).second) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Difference difference, ExpandedCheck(shape, stream_).run());
  if (!difference.within(kTolerance)) {
    return make_error(
        StatusCode::kUnavailable,
        "self-test: expanded latent attention is wrong on this GPU: it differs from the reference "
        "by {:.2g} of its size ({:.2g} is allowed), most at row {}, output {}: {:.6g} instead of "
        "{:.6g}; use --device cpu, and report it",
        difference.relative(), kTolerance, difference.row, difference.column, difference.got,
        difference.want);
  }
  finish("expanded latent attention", start);
  return {};
}

}  // namespace nibble::cuda
