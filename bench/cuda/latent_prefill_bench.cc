#include "bench/cuda/latent_prefill_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_heads.h"
#include "backend/cuda/device_info.h"
#include "backend/cuda/expanded_latents.h"
#include "backend/cuda/latent.h"
#include "backend/cuda/uploader.h"
#include "bench/cuda/bench_timer.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kRowDim = kExpandedRank + kExpandedRope;
constexpr int64_t kQueryDim = kExpandedNope + kExpandedRope;
constexpr int32_t kPageSize = 64;
constexpr int kReplays = 7;
constexpr double kLeastUs = 2000;  // of what is timed at once

/// Random numbers of about 0.3, or with a weight's spread of about 0.05.
std::vector<uint16_t> random_numbers(size_t count, uint32_t exponent) {
  std::vector<uint16_t> numbers(count);
  std::mt19937 random(5);
  for (uint16_t& number : numbers) {
    number = static_cast<uint16_t>((random() & 0x80ffU) | exponent);
  }
  return numbers;
}

Result<DeviceMemory> filled(size_t numbers) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::allocate(numbers * 2));
  const std::vector<uint16_t> piece = random_numbers(size_t{8} << 20, 0x3e80U);
  for (size_t at = 0; at < numbers; at += piece.size()) {
    NIBBLE_RETURN_IF_ERROR(
        check(cudaMemcpy(memory.as<uint16_t>() + at, piece.data(),
                         std::min(piece.size(), numbers - at) * 2, cudaMemcpyHostToDevice),
              "filling memory"));
  }
  return memory;
}

Result<DeviceMemory> upload(const std::vector<int32_t>& values) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory memory,
                          DeviceMemory::allocate(values.size() * sizeof(int32_t)));
  NIBBLE_RETURN_IF_ERROR(check(cudaMemcpy(memory.as<int32_t>(), values.data(),
                                          values.size() * sizeof(int32_t), cudaMemcpyHostToDevice),
                               "uploading"));
  return memory;
}

/// A layer's matrices, memory and step.
class PrefillBench final {
 public:
  explicit PrefillBench(const LatentPrefillCase& shape)
      : shape_(shape),
        latent_{.page_size = kPageSize,
                .row_dim = static_cast<int32_t>(kRowDim),
                .heads = shape.heads,
                .scale = 1.0F / std::sqrt(static_cast<float>(kQueryDim))} {}

  Status prepare() {
    NIBBLE_ASSIGN_OR_RETURN(timer_, Timer::make());
    NIBBLE_RETURN_IF_ERROR(prepare_heads());
    NIBBLE_RETURN_IF_ERROR(prepare_step());
    const auto queries = static_cast<size_t>(int64_t{shape_.rows} * shape_.heads);
    NIBBLE_ASSIGN_OR_RETURN(q_, filled(queries * kQueryDim));
    NIBBLE_ASSIGN_OR_RETURN(rotated_, filled(queries * kRowDim));
    NIBBLE_ASSIGN_OR_RETURN(attended_, filled(queries * kRowDim));
    NIBBLE_ASSIGN_OR_RETURN(out_, filled(queries * kExpandedValue));
    const ExpandedLatents::Sizes sizes{
        .heads = shape_.heads,
        .piece_tokens = expanded_piece_tokens(shape_.heads, shape_.kv_len),
        .sequences = 1};
    piece_tokens_ = sizes.piece_tokens;
    NIBBLE_ASSIGN_OR_RETURN(expanded_, ExpandedLatents::create(sizes));
    const auto tokens = static_cast<size_t>(piece_tokens_);
    NIBBLE_ASSIGN_OR_RETURN(gathered_, filled(tokens * kRowDim));
    NIBBLE_ASSIGN_OR_RETURN(made_,
                            filled(tokens * static_cast<size_t>(shape_.heads) * kExpandedNope * 2));
    return {};
  }

  Result<LatentPrefillTimes> run() {
    LatentPrefillTimes times;
    NIBBLE_ASSIGN_OR_RETURN(times.absorbed_us, time([&] { return absorb(); }));
    NIBBLE_ASSIGN_OR_RETURN(times.expanded_us, time([&] {
                              expanded_->run(args(), {&sequence_, 1}, step_, timer_->stream());
                              return Status();
                            }));
    NIBBLE_ASSIGN_OR_RETURN(times.expansion_us, time([&] { return expand(); }));
    return times;
  }

 private:
  Status prepare_heads() {
    NIBBLE_ASSIGN_OR_RETURN(device_, query_device(0));
    if (!device_.hopper()) {
      return make_error(StatusCode::kUnavailable, "{} is no Hopper GPU, which expands latents",
                        device_.name);
    }
    NIBBLE_ASSIGN_OR_RETURN(Uploader uploader, Uploader::create(timer_->stream()));
    const GemmContext context{
        .device = device_, .stream = timer_->stream(), .scratch = scratch_, .uploader = uploader};
    const std::vector<uint16_t> weights =
        random_numbers(size_t{kExpandedRank} * kExpandedNope, 0x3d00U);
    const auto views = [&](int64_t n, int64_t k) {
      return std::vector<QuantView>(static_cast<size_t>(shape_.heads),
                                    {.format = {.code = WeightCode::kBf16},
                                     .n = n,
                                     .k = k,
                                     .codes = reinterpret_cast<const std::byte*>(weights.data())});
    };
    NIBBLE_ASSIGN_OR_RETURN(keys_, CudaHeads::create(views(kExpandedRank, kExpandedNope), context));
    NIBBLE_ASSIGN_OR_RETURN(values_,
                            CudaHeads::create(views(kExpandedValue, kExpandedRank), context));
    return timer_->wait();
  }

  Status prepare_step() {
    sequence_ = {.rows = shape_.rows, .kv_len = shape_.kv_len};
    const int32_t pages = (shape_.kv_len + kPageSize - 1) / kPageSize;
    std::vector<int32_t> table(static_cast<size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    // q_begin, kv_len, then the rows' positions and their sequences.
    std::vector<int32_t> numbers = {0, shape_.rows, shape_.kv_len};
    for (int32_t row = 0; row < shape_.rows; ++row) {
      numbers.push_back(shape_.kv_len - shape_.rows + row);
    }
    numbers.resize(numbers.size() + static_cast<size_t>(shape_.rows), 0);
    NIBBLE_ASSIGN_OR_RETURN(table_, upload(table));
    NIBBLE_ASSIGN_OR_RETURN(numbers_, upload(numbers));
    const auto* const at = numbers_.as<int32_t>();
    step_ = {.q_begin = at,
             .kv_len = at + 2,
             .page_table = table_.as<int32_t>(),
             .page_table_stride = pages,
             .row_position = at + 3,
             .row_sequence = at + 3 + shape_.rows,
             .sequences = 1,
             .rows = shape_.rows};
    NIBBLE_ASSIGN_OR_RETURN(pages_,
                            filled(static_cast<size_t>(pages * latent_page_bytes(latent_)) / 2));
    NIBBLE_ASSIGN_OR_RETURN(plan_,
                            DeviceMemory::allocate(latent_plan_bytes(latent_, 1, shape_.rows)));
    NIBBLE_ASSIGN_OR_RETURN(workspace_,
                            DeviceMemory::allocate(latent_workspace_bytes(latent_, 1) + 1));
    NIBBLE_RETURN_IF_ERROR(
        check(plan_latent(latent_, step_, plan_.as<void>(), {timer_->stream(), false}), "plan"));
    return timer_->wait();
  }

  [[nodiscard]] ExpandedLatentArgs args() const {
    KvView kv{.code = KvCode::kBf16,
              .page_size = kPageSize,
              .kv_heads = 1,
              .head_dim = kRowDim,
              .pages = pages_.as<std::byte>(),
              .latent_rank = kExpandedRank};
    return {.heads = shape_.heads,
            .nope_dim = kExpandedNope,
            .value_dim = kExpandedValue,
            .scale = latent_.scale,
            .q = {q_.as<void>(), DType::kBF16},
            .q_stride = shape_.heads * kQueryDim,
            .rotated = {rotated_.as<void>(), DType::kBF16},
            .unfinished = {attended_.as<void>(), DType::kBF16},
            .out = {out_.as<void>(), DType::kBF16},
            .keys = keys_.get(),
            .values = values_.get(),
            .kv = kv};
  }

  /// As a step does.
  Status absorb() {
    const int64_t width = shape_.heads * kRowDim;
    keys_->run({.x = {q_.as<void>(), DType::kBF16},
                .x_stride = shape_.heads * kQueryDim,
                .x_head = kQueryDim,
                .m = shape_.rows,
                .y = {rotated_.as<void>(), DType::kBF16},
                .y_stride = width,
                .y_head = kRowDim});
    const LatentLaunch launch{.shape = latent_,
                              .step = step_,
                              .plan = plan_.as<void>(),
                              .pages = pages_.as<void>(),
                              .q = rotated_.as<void>(),
                              .q_stride = width,
                              .out = attended_.as<void>(),
                              .out_stride = width,
                              .workspace = workspace_.as<void>()};
    NIBBLE_RETURN_IF_ERROR(check(decode_latent(launch, {timer_->stream()}), "attention"));
    if (shape_.rows > 1) {
      NIBBLE_RETURN_IF_ERROR(check(prefill_latent(launch, {timer_->stream()}), "attention"));
    }
    values_->run({.x = {attended_.as<void>(), DType::kBF16},
                  .x_stride = width,
                  .x_head = kRowDim,
                  .m = shape_.rows,
                  .y = {out_.as<void>(), DType::kBF16},
                  .y_stride = int64_t{shape_.heads} * kExpandedValue,
                  .y_head = kExpandedValue});
    return {};
  }

  /// What ExpandedLatents::run() does without attention.
  Status expand() {
    auto* const rotated = gathered_.as<uint16_t>() + int64_t{piece_tokens_} * kExpandedRank;
    for (const ExpandedPiece& piece : cut_into_pieces({&sequence_, 1}, piece_tokens_)) {
      NIBBLE_RETURN_IF_ERROR(check(gather_latents({.shape = latent_,
                                                   .step = step_,
                                                   .piece = &piece,
                                                   .pages = pages_.as<void>(),
                                                   .latents = gathered_.as<void>(),
                                                   .rotated = rotated},
                                                  {timer_->stream()}),
                                   "gathering latents"));
      const int64_t width = int64_t{shape_.heads} * kExpandedNope;
      HeadsArgs heads{.x = {gathered_.as<void>(), DType::kBF16},
                      .x_stride = kExpandedRank,
                      .x_head = 0,
                      .m = piece.tokens,
                      .y = {made_.as<void>(), DType::kBF16},
                      .y_stride = width,
                      .y_head = kExpandedNope};
      keys_->run_transposed(heads);
      heads.y = heads.y.at(piece_tokens_ * width);
      values_->run(heads);
    }
    return {};
  }

  /// Median microseconds of work(), issued as often as makes it long enough to be timed.
  template <typename Work>
  Result<double> time(Work&& work) {
    NIBBLE_RETURN_IF_ERROR(work());  // plans of products are made
    NIBBLE_RETURN_IF_ERROR(timer_->wait());
    NIBBLE_ASSIGN_OR_RETURN(const double once, timer_->time(work));
    const int count = std::clamp(static_cast<int>(kLeastUs / once), 1, 40);
    std::vector<double> times;
    for (int i = 0; i < kReplays; ++i) {
      NIBBLE_ASSIGN_OR_RETURN(const double us, timer_->time([&] {
        for (int j = 0; j < count; ++j) {
          NIBBLE_RETURN_IF_ERROR(work());
        }
        return Status();
      }));
      times.push_back(us / count);
    }
    return median(times);
  }

  LatentPrefillCase shape_;
  LatentShape latent_;
  ExpandedSequence sequence_;
  int32_t piece_tokens_ = 0;
  StepMetadata step_;
  DeviceInfo device_;
  GemmScratch scratch_;
  std::unique_ptr<Timer> timer_;
  std::unique_ptr<PreparedHeads> keys_, values_;
  std::unique_ptr<ExpandedLatents> expanded_;
  DeviceMemory table_, numbers_, pages_, plan_, workspace_;
  DeviceMemory q_, rotated_, attended_, out_;
  DeviceMemory gathered_, made_;
};

}  // namespace

Result<LatentPrefillTimes> time_latent_prefill(const LatentPrefillCase& shape) {
  PrefillBench bench(shape);
  NIBBLE_RETURN_IF_ERROR(bench.prepare());
  return bench.run();
}

}  // namespace nibble::cuda
