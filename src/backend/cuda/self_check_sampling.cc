#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cuda/sampling.h"
#include "backend/cuda/self_check.h"
#include "backend/cuda/self_check_data.h"
#include "base/f16.h"

namespace nibble::cuda {
namespace {

constexpr uint32_t kSeed = 22;
constexpr float kInverseTemperature = 1.25F;
// Sums of weights are rounded at 2^-24 of each: far less than that of the sum.
constexpr double kSlack = 1e-5;

/// The steps of one token's draw by their definitions: the likeliest of equals is the first one,
/// and a drawn token is that in which the sum of weights passes the random number.
class SampleReference final {
 public:
  explicit SampleReference(std::span<const float> logits) : logits_(logits) {
    largest_ = std::ranges::max_element(logits) - logits.begin();
  }
  [[nodiscard]] bool greedy(int32_t token) const { return token == largest_; }
  /// Whether the token may have been drawn: it is, or a boundary is within kSlack.
  [[nodiscard]] bool drawn(int32_t token, const RowSampling& sampling) const {
    const double most = logits_[static_cast<size_t>(largest_)];
    double sum = 0, begin = 0, end = 0;
    for (int32_t i = 0; i < std::ssize(logits_); ++i) {
      begin = i == token ? sum : begin;
      sum += std::exp((logits_[static_cast<size_t>(i)] - most) * sampling.inverse_temperature);
      end = i == token ? sum : end;
    }
    const double target = draw_uniform(sampling.seed, sampling.step) * sum;
    return end > begin && begin - kSlack * sum <= target && target < end + kSlack * sum;
  }

 private:
  std::span<const float> logits_;
  int64_t largest_ = 0;
};

}  // namespace

Status SelfCheck::check_sampling(int64_t vocab) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<RowSampling> sampling = {
      {.seed = 1}, {.seed = kSeed, .step = 5, .inverse_temperature = kInverseTemperature}};
  const auto rows = std::ssize(sampling);
  const std::vector<uint16_t> random = random_bf16(static_cast<size_t>(rows * vocab), kSeed);
  std::vector<float> logits(random.size());
  std::ranges::transform(random, logits.begin(), bf16_to_f32);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer device_sampling, device_copy(sampling));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer tokens, poisoned_device(sizeof(int32_t) * 2));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer status, poisoned_device(sizeof(SampleStatus) * 2));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer workspace,
                          allocate_zeroed(sample_workspace_bytes(rows, 0), "the self-test"));
  for (const SampleRange range : {SampleRange::kGreedy, SampleRange::kAny}) {
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer device_logits, device_copy(logits));
    NIBBLE_RETURN_IF_ERROR(check(sample_tokens({.range = range,
                                                .logits = device_logits.as<float>(),
                                                .stride = vocab,
                                                .rows = rows,
                                                .vocab = vocab,
                                                .sampling = device_sampling.as<RowSampling>(),
                                                .tokens = tokens.as<int32_t>(),
                                                .status = status.as<SampleStatus>(),
                                                .workspace = workspace.as<void>(),
                                                .max_rows = rows},
                                               {stream_}),
                                 "sample_tokens"));
    NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream_), "sample_tokens"));
    std::vector<int32_t> sampled(sampling.size());
    NIBBLE_RETURN_IF_ERROR(copy_back(tokens, 0, std::span(sampled)));
    for (size_t row = 0; row < sampling.size(); ++row) {
      const SampleReference reference(std::span<const float>(logits).subspan(
          row * static_cast<size_t>(vocab), static_cast<size_t>(vocab)));
      const bool greedy =
          range == SampleRange::kGreedy || sampling[row].inverse_temperature == 0.0F;
      const bool right =
          greedy ? reference.greedy(sampled[row]) : reference.drawn(sampled[row], sampling[row]);
      if (!right) {
        return make_error(StatusCode::kUnavailable,
                          "self-test: kernel sample_tokens is wrong on this GPU: of {} logits it "
                          "{} token {}; serve with --device cpu, and report it",
                          vocab, greedy ? "takes as the largest that of" : "draws", sampled[row]);
      }
    }
  }
  finish("sample_tokens", start);
  return {};
}

}  // namespace nibble::cuda
