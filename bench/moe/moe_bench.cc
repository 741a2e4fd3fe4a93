#include "bench/moe/moe_bench.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/ranges.h>

#include "base/math.h"
#include "bench/moe/steering.h"

namespace nibble {

namespace {

constexpr int64_t kMostCopies = 64;  // of a layer so small that no number of copies is cold
constexpr double kUsedMemory = 0.9;  // of a GPU's, by all copies

/// One layer in one scheme with the rows that run through it.
class MoeRounds final {
 public:
  MoeRounds(Backend& backend, const MoeBenchOptions& options)
      : backend_(backend), options_(options), shape_(options.shape) {}

  /// Rows for the largest m, and as many copies of the layer as the smallest one needs.
  Status prepare(const QuantScheme& scheme, int64_t cold_bytes) {
    const int64_t most = shape_.rows_of(std::ranges::max(options_.row_counts));
    NIBBLE_RETURN_IF_ERROR(prepare_rows(most));
    NIBBLE_ASSIGN_OR_RETURN(const MoeWeights weights, MoeWeights::create(shape_, scheme));
    const ExpertsRequest request = weights.request(most);
    const int64_t free = backend_.free_memory();
    int64_t wanted = 1;
    while (std::ssize(layers_) < wanted) {
      NIBBLE_ASSIGN_OR_RETURN(auto layer, backend_.prepare_experts(request));
      layers_.push_back(std::move(layer));
      if (layers_.size() == 1) {
        NIBBLE_RETURN_IF_ERROR(check_kernel());
        wanted = copies_wanted(cold_bytes, free);
      }
    }
    cold_bytes_ = cold_bytes;
    return {};
  }

  Result<MoeTiming> time(int64_t m, RunClock& clock) {
    const int64_t rows = shape_.rows_of(m);
    const ExpertLoad load = load_of_rows(rows);
    const PreparedExperts& layer = *layers_.front();
    const int64_t bytes = layer.active_bytes(load.active);
    const int64_t needed = options_.copies > 0 ? options_.copies : ceil_div(cold_bytes_, bytes);
    const int64_t copies = std::min(std::ssize(layers_), needed);
    NIBBLE_ASSIGN_OR_RETURN(
        const RunTimings timings,
        clock.time({.issue = [this](int64_t copy, int64_t count) { run(copy, count); },
                    .copies = copies,
                    .rows = rows,
                    .recordable = layer.recordable()}));
    MoeTiming timing{.kernel = std::string(layer.kernel_name()),
                     .m = m,
                     .rows = rows,
                     .slots = rows * shape_.top_k,
                     .copies = copies,
                     .load = load,
                     .us = quartiles(timings.us),
                     .active_bytes = bytes,
                     .read_gbps = median(timings.read_gbps),
                     .launches = timings.launches};
    const auto active = static_cast<double>(bytes);
    timing.gbps = active / timing.us.median * 1e-3;
    const auto weights = static_cast<double>(3 * shape_.hidden * shape_.width);
    timing.tflops = 2 * static_cast<double>(timing.slots) * weights / timing.us.median * 1e-6;
    std::vector<double> percents(timings.us.size());
    std::ranges::transform(timings.us, timings.read_gbps, percents.begin(),
                           [&](double us, double read) { return 100 * active / us * 1e-3 / read; });
    timing.read_percent = quartiles(percents);
    return timing;
  }

 private:
  Status prepare_rows(int64_t rows) {
    chosen_ = choose_experts({.routing = options_.routing,
                              .experts = shape_.experts,
                              .top_k = shape_.top_k,
                              .rows = rows,
                              .seed = options_.seed});
    NIBBLE_ASSIGN_OR_RETURN(const Buffer x, steered_rows({.chosen = chosen_,
                                                          .top_k = shape_.top_k,
                                                          .experts = shape_.experts,
                                                          .hidden = shape_.hidden},
                                                         options_.seed));
    NIBBLE_ASSIGN_OR_RETURN(x_, backend_.upload(x.as<float>()));  // pairs of BF16
    const std::vector<float> zeros(static_cast<size_t>(rows * shape_.hidden), 0.0F);
    NIBBLE_ASSIGN_OR_RETURN(y_, backend_.upload(zeros));
    return {};
  }

  [[nodiscard]] Status check_kernel() const {
    const std::string_view kernel = layers_.front()->kernel_name();
    const auto& kernels = options_.kernels;
    if (kernels.empty() || std::ranges::find(kernels, kernel) != kernels.end()) {
      return {};
    }
    return make_error(StatusCode::kInvalidArgument,
                      "--kernel {}: the experts take {}; choose that, or leave it out",
                      fmt::join(kernels, ","), kernel);
  }

  /// With the first copy there; `free` bytes were before it was.
  [[nodiscard]] int64_t copies_wanted(int64_t cold_bytes, int64_t free) const {
    if (options_.copies > 0) {
      return options_.copies;
    }
    const int64_t fewest = shape_.rows_of(std::ranges::min(options_.row_counts));
    const PreparedExperts& layer = *layers_.front();
    const int64_t read = layer.active_bytes(load_of_rows(fewest).active);
    int64_t most = kMostCopies;
    if (free > 0) {
      const double fit = kUsedMemory * static_cast<double>(free) /
                         static_cast<double>(layer.active_bytes(shape_.experts));
      most = std::clamp<int64_t>(static_cast<int64_t>(fit), 1, kMostCopies);
    }
    return std::min(most, ceil_div(cold_bytes, read));
  }

  [[nodiscard]] ExpertLoad load_of_rows(int64_t rows) const {
    const auto slots = static_cast<size_t>(rows * shape_.top_k);
    return load_of(std::span(chosen_).first(slots), shape_.experts);
  }

  void run(int64_t copy, int64_t rows) {
    layers_[static_cast<size_t>(copy)]->run({.x = {x_.as<void>(), DType::kBF16},
                                             .x_stride = shape_.hidden,
                                             .m = rows,
                                             .y = y_.as<float>(),
                                             .y_stride = shape_.hidden});
  }

  Backend& backend_;
  const MoeBenchOptions& options_;
  const MoeShape& shape_;
  std::vector<int32_t> chosen_;  // [rows, top_k]
  DeviceBuffer x_;               // [rows, hidden] bf16
  DeviceBuffer y_;               // [rows, hidden] f32
  std::vector<std::unique_ptr<PreparedExperts>> layers_;
  int64_t cold_bytes_ = 0;
};

}  // namespace

Status check_moe_scheme(Backend& backend, const QuantScheme& scheme, const MoeShape& shape) {
  MoeShape one = shape;
  one.experts = 1;
  one.top_k = 1;
  NIBBLE_ASSIGN_OR_RETURN(const MoeWeights weights, MoeWeights::create(one, scheme));
  return backend.prepare_experts(weights.request(1)).status();
}

Result<std::vector<MoeTiming>> bench_moe(Backend& backend,
                                         RunClock& clock,
                                         const QuantScheme& scheme,
                                         const MoeBenchOptions& options) {
  MoeRounds rounds(backend, options);
  NIBBLE_RETURN_IF_ERROR(rounds.prepare(scheme, clock.cold_bytes()));
  std::vector<MoeTiming> timings;
  for (const int64_t m : options.row_counts) {
    NIBBLE_ASSIGN_OR_RETURN(MoeTiming timing, rounds.time(m, clock));
    timing.scheme = scheme.name;
    timings.push_back(timing);
    if (options.progress) {
      options.progress(timing);
    }
  }
  return timings;
}

}  // namespace nibble
