#include "bench/kernels/gemm_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <utility>

#include "base/f16.h"
#include "bench/kernels/random_weight.h"
#include "core/buffer.h"

namespace nibble {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kColdBytes = int64_t{400} << 20;  // beyond the caches
constexpr size_t kTimings = 9;

Result<QuantTensor> copy_of(const QuantTensor& weight) {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor copy,
                          QuantTensor::allocate(weight.format, weight.n, weight.k));
  std::memcpy(copy.codes.data(), weight.codes.data(), weight.codes.size());
  if (weight.scales.size() > 0) {
    std::memcpy(copy.scales.data(), weight.scales.data(), weight.scales.size());
  }
  if (weight.zeros.size() > 0) {
    std::memcpy(copy.zeros.data(), weight.zeros.data(), weight.zeros.size());
  }
  if (weight.minimums.size() > 0) {
    std::memcpy(copy.minimums.data(), weight.minimums.data(), weight.minimums.size());
  }
  return copy;
}

struct PackedCopy {
  size_t shape = 0;                    // index into GemmBenchOptions::shapes
  std::unique_ptr<PreparedGemm> gemm;  // a CpuGemm
};

/// Copies of all shapes in turn, until a round over them reads more than the caches hold.
Result<std::vector<PackedCopy>> make_copies(Backend& backend,
                                            const QuantScheme& scheme,
                                            const GemmBenchOptions& options) {
  std::vector<QuantTensor> weights;
  std::vector<ActSpec> acts;
  for (const GemmShape shape : options.shapes) {
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, random_weight(scheme.weight, shape.n, shape.k, 1));
    weights.push_back(std::move(weight));
    acts.push_back(bench_act(scheme, shape.k, options.a4_share));
  }
  std::vector<PackedCopy> copies;
  for (int64_t bytes = 0; bytes < kColdBytes;) {
    for (size_t shape = 0; shape < weights.size(); ++shape) {
      NIBBLE_ASSIGN_OR_RETURN(const QuantTensor weight, copy_of(weights[shape]));
      NIBBLE_ASSIGN_OR_RETURN(
          auto gemm,
          backend.prepare_gemm(weight, acts[shape], std::ranges::max(options.row_counts)));
      bytes += gemm->weight_bytes();
      copies.push_back({shape, std::move(gemm)});
    }
  }
  return copies;
}

Status random_activations(int64_t count, Buffer& values) {
  NIBBLE_ASSIGN_OR_RETURN(values, Buffer::allocate(static_cast<size_t>(count) * sizeof(uint16_t)));
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::ranges::generate(values.as<uint16_t>(), [&] { return f32_to_bf16(normal(random)); });
  return {};
}

double ops_of(int64_t m, GemmShape shape) {
  return 2.0 * static_cast<double>(m * shape.n * shape.k);
}

/// Microseconds that products took, and what each would have taken at the ceilings around it.
struct Timings {
  std::vector<double> us;
  std::vector<double> input_us;  // of us
  std::vector<double> roof_us;
};

/// Goes round the copies of one scheme, on through all calls.
class GemmRounds final {
 public:
  GemmRounds(const QuantScheme& scheme,
             std::vector<PackedCopy> copies,
             const GemmBenchOptions& options)
      : scheme_(scheme), copies_(std::move(copies)), options_(options) {}

  Status prepare() {
    int64_t widest_k = 0;
    int64_t widest_n = 0;
    for (const GemmShape shape : options_.shapes) {
      widest_k = std::max(widest_k, shape.k);
      widest_n = std::max(widest_n, shape.n);
    }
    const int64_t rows = std::ranges::max(options_.row_counts);
    NIBBLE_RETURN_IF_ERROR(random_activations(rows * widest_k, x_));
    NIBBLE_ASSIGN_OR_RETURN(
        y_, Buffer::allocate(static_cast<size_t>(rows * widest_n) * sizeof(uint16_t)));
    std::ranges::fill(y_.as<uint16_t>(), uint16_t{0});
    return {};
  }

  /// Begins the timings of another m.
  void start(int64_t m) {
    m_ = m;
    timings_.assign(options_.shapes.size(), {});
  }
  /// Times the product of each shape once.
  void time_shapes() {
    for (size_t i = 0; i < options_.shapes.size(); ++i) {
      const Roof before = measure_roof();
      run(copies_[(next_ + copies_.size() - 1) % copies_.size()], 1);  // wakes the threads
      const PackedCopy& copy = copies_[next_];
      next_ = (next_ + 1) % copies_.size();
      const RunTime time = run(copy, m_);
      timings_[copy.shape].us.push_back(time.us);
      timings_[copy.shape].input_us.push_back(time.input_us);
      timings_[copy.shape].roof_us.push_back(roof_us(copy, before, measure_roof()));
    }
  }

  /// first: of the scheme that speeds are compared with.
  [[nodiscard]] GemmTiming timing(size_t shape, const GemmRounds& first) const {
    const Timings& timed = timings_[shape];
    const PreparedGemm& gemm = *copies_[shape].gemm;
    const double us = median(timed.us);
    return {.scheme = std::string(scheme_.name),
            .kernel = std::string(gemm.kernel_name()),
            .m = m_,
            .shape = options_.shapes[shape],
            .us = us,
            .input_us = median(timed.input_us),
            .gbps = static_cast<double>(gemm.weight_bytes()) / us * 1e-3,
            .tops = ops_of(m_, options_.shapes[shape]) / us * 1e-6,
            .roofline_percent = quartiles(ratios(timed.roof_us, timed.us, 100)),
            .speed = median(ratios(first.timings_[shape].us, timed.us, 1))};
  }

 private:
  struct RunTime {
    double us = 0;
    double input_us = 0;
  };

  struct Roof {
    double read_gbps = 0;
    double tops = 0;  // 0: not known
  };

  static std::vector<double> ratios(const std::vector<double>& times,
                                    const std::vector<double>& of,
                                    double unit) {
    std::vector<double> all(of.size());
    std::ranges::transform(times, of, all.begin(),
                           [unit](double time, double by) { return unit * time / by; });
    return all;
  }

  Roof measure_roof() {
    const double tops = options_.ceilings->peak_tops(options_.isa, scheme_.act).value_or(0.0);
    return {options_.ceilings->read_gbps(), tops};
  }

  /// What a product would take at the mean of two roofs.
  [[nodiscard]] double roof_us(const PackedCopy& copy,
                               const Roof& before,
                               const Roof& after) const {
    const auto bytes = static_cast<double>(copy.gemm->weight_bytes());
    const double reading = bytes / ((before.read_gbps + after.read_gbps) / 2) * 1e-3;
    const double tops = (before.tops + after.tops) / 2;
    const double ops = ops_of(m_, options_.shapes[copy.shape]);
    return std::max(reading, tops > 0 ? ops / tops * 1e-6 : 0.0);
  }

  /// A product as PreparedGemm::run() computes it.
  RunTime run(const PackedCopy& copy, int64_t m) {
    const GemmShape shape = options_.shapes[copy.shape];
    const GemmArgs args{.x = {x_.data(), DType::kBF16},
                        .x_stride = shape.k,
                        .m = m,
                        .y = {y_.data(), DType::kBF16},
                        .y_stride = shape.n};
    PreparedGemm& gemm = *copy.gemm;
    const auto begin = Clock::now();
    gemm.round_rows(args);
    const std::chrono::duration<double, std::micro> input = Clock::now() - begin;
    gemm.multiply(args);
    const std::chrono::duration<double, std::micro> both = Clock::now() - begin;
    return {.us = both.count(), .input_us = input.count()};
  }

  QuantScheme scheme_;
  std::vector<PackedCopy> copies_;
  const GemmBenchOptions& options_;
  Buffer x_;  // aligned as the engine's
  Buffer y_;
  size_t next_ = 0;
  int64_t m_ = 0;
  std::vector<Timings> timings_;  // by shape
};

/// Whether a product is one of those that are asked for.
bool wanted(const PreparedGemm& gemm, const GemmBenchOptions& options) {
  return options.kernels.empty() || std::ranges::count(options.kernels, gemm.kernel_name()) > 0;
}

}  // namespace

Result<std::vector<GemmTiming>> bench_gemm(Backend& backend,
                                           std::span<const QuantScheme> schemes,
                                           const GemmBenchOptions& options) {
  std::vector<GemmRounds> rounds;
  for (const QuantScheme& scheme : schemes) {
    NIBBLE_ASSIGN_OR_RETURN(auto copies, make_copies(backend, scheme, options));
    if (wanted(*copies.front().gemm, options)) {
      rounds.emplace_back(scheme, std::move(copies), options);
      NIBBLE_RETURN_IF_ERROR(rounds.back().prepare());
    }
  }
  std::vector<GemmTiming> timings;
  for (const int64_t m : options.row_counts) {
    std::ranges::for_each(rounds, [m](GemmRounds& of_scheme) { of_scheme.start(m); });
    for (size_t i = 0; i < kTimings; ++i) {
      std::ranges::for_each(rounds, [](GemmRounds& of_scheme) { of_scheme.time_shapes(); });
    }
    for (size_t shape = 0; shape < options.shapes.size(); ++shape) {
      for (const GemmRounds& of_scheme : rounds) {
        timings.push_back(of_scheme.timing(shape, rounds.front()));
      }
    }
  }
  return timings;
}

}  // namespace nibble
