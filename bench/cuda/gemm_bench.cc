#include "bench/cuda/gemm_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_blocks.h"
#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/row_kernels.h"
#include "bench/cuda/bench_data.h"
#include "bench/cuda/bench_timer.h"
#include "bench/kernels/random_weight.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble::cuda {
namespace {

constexpr std::string_view kYardstick = "gemm_bf16_cublaslt";
constexpr double kMaxError = 0.01;  // BF16 rounds decoded weights and results by 2^-9 at most
// Least launches of a graph: as in a model's step, its first and last weigh little among them.
constexpr int64_t kShortLaunches = 32, kLongLaunches = 4, kShortRows = 256;

/// What all kernels of one scheme and shape share: canonical weights, and activations of each m.
struct Subject {
  QuantScheme scheme;
  GemmShape shape;
  int64_t max_m = 0;
  ActFormat act = ActFormat::kBf16;
  double weight_bytes = 0;
  ActSpec spec;
  std::shared_ptr<const DeviceBlocks> blocks;  // of rows in blocks
  DeviceMemory codes, scales, decoded;         // decoded: bf16
  DeviceMemory x, x_bf16, x_scales;
  DeviceMemory y, expected, sums;
};

/// One kernel with its copies of the weights and its recorded launches at the present m.
struct Candidate {
  std::string name;
  std::unique_ptr<GemmKernel> kernel;
  bool yardstick = false;
  DeviceMemory packed, workspace;
  size_t stride = 0;  // bytes from one copy to the next
  int64_t copies = 0;
  Recording launches;
  std::vector<double> us;

  Candidate() = default;
  Candidate(Candidate&& other) noexcept = default;
  Candidate& operator=(Candidate&& other) noexcept = default;
};

bool is_wide(const Subject& subject) { return subject.act == ActFormat::kBf16Blocks; }

/// Scales of the rows, as the products of a format find them.
size_t scales_of_rows(const Subject& subject) {
  if (subject.blocks != nullptr && !is_wide(subject)) {  // and of a whole tile of tokens more
    return static_cast<size_t>(int_scale_rows(subject.blocks->view(), subject.shape.k) *
                               (int_scale_stride(subject.max_m) + 128));
  }
  return static_cast<size_t>(subject.max_m *
                             std::max<int64_t>(1, row_scales(subject.act, subject.shape.k)));
}

/// The rows in any form.
size_t bytes_of_rows(const Subject& subject) {
  const int64_t k = subject.shape.k;
  const int64_t numbers = is_wide(subject) ? most_wide_row_numbers(k) : k;
  return static_cast<size_t>(subject.max_m * numbers) * 2;
}

/// Numbers of BF16, rounded as a model's are, and then the numbers that they have become.
cudaError_t fill_wide_activations(const Subject& subject, size_t values, cudaStream_t stream) {
  const IntBlocks& blocks = subject.blocks->view();
  cudaError_t error =
      random_activations(ActFormat::kBf16, subject.x_bf16.as<void>(), values, 3, stream);
  if (error == cudaSuccess) {
    error = quantize_rows(
        {.x = subject.x_bf16.as<void>(),
         .rows = subject.max_m,
         .n = subject.shape.k,
         .out = {subject.act, subject.x.as<void>(), subject.x_scales.as<float>(), blocks}},
        {.stream = stream, .overlap = false});
  }
  return error == cudaSuccess ? decode_wide_activations({.blocks = blocks,
                                                         .x = subject.x.as<void>(),
                                                         .scales = subject.x_scales.as<float>(),
                                                         .out = subject.x_bf16.as<void>(),
                                                         .rows = subject.max_m,
                                                         .k = subject.shape.k},
                                                        stream)
                              : error;
}

cudaError_t fill_activations(const Subject& subject,
                             const std::vector<float>& scales,
                             size_t values,
                             cudaStream_t stream) {
  const cudaError_t copied = cudaMemcpyAsync(subject.x_scales.as<void>(), scales.data(),
                                             scales.size() * 4, cudaMemcpyHostToDevice, stream);
  if (copied != cudaSuccess) {
    return copied;
  }
  if (is_wide(subject)) {
    return fill_wide_activations(subject, values, stream);
  }
  void* x = subject.x.as<void>();
  const cudaError_t error = subject.blocks != nullptr
                                ? random_block_activations(subject.blocks->view(), x, subject.max_m,
                                                           subject.shape.k, stream)
                                : random_activations(subject.act, x, values, 3, stream);
  return error == cudaSuccess
             ? decode_activations(subject.act, x, subject.x_bf16.as<void>(), values, stream)
             : error;
}

Result<Subject> make_subject(const QuantScheme& scheme,
                             GemmShape shape,
                             const GemmBenchOptions& options,
                             Timer& timer) {
  const int64_t max_m = *std::ranges::max_element(options.row_counts);
  Subject subject{.scheme = scheme,
                  .shape = shape,
                  .max_m = max_m,
                  .spec = bench_act(scheme, shape.k, options.a4_share)};
  subject.act = scheme.act == ActFormat::kFloat ? ActFormat::kBf16 : scheme.act;
  NIBBLE_ASSIGN_OR_RETURN(subject.blocks,
                          DeviceBlocks::create(subject.spec, scheme.weight, shape.k));
  const WeightFormat& format = scheme.weight;
  const auto weights = static_cast<size_t>(shape.n * shape.k);
  subject.weight_bytes = bits_per_weight(format, shape.k) / 8.0 * static_cast<double>(weights);
  const int64_t row_bytes = QuantTensor::code_row_bytes(format.code, shape.k);
  const auto code_bytes = static_cast<size_t>(row_bytes * shape.n);
  const auto scales = static_cast<size_t>(format.groups(shape.k) * shape.n);
  const auto values = static_cast<size_t>(max_m * shape.k);
  const auto results = static_cast<size_t>(max_m * shape.n);
  NIBBLE_ASSIGN_OR_RETURN(subject.codes, DeviceMemory::allocate(code_bytes));
  const bool zeros = format.zero_points != ZeroPoints::kNone;  // behind the scales; here all 0
  NIBBLE_ASSIGN_OR_RETURN(subject.scales, DeviceMemory::allocate(scales * (zeros ? 8 : 4)));
  NIBBLE_ASSIGN_OR_RETURN(subject.decoded, DeviceMemory::allocate(weights * 2));
  NIBBLE_ASSIGN_OR_RETURN(subject.x, DeviceMemory::allocate(bytes_of_rows(subject)));
  NIBBLE_ASSIGN_OR_RETURN(subject.x_bf16, DeviceMemory::allocate(values * 2));
  const std::vector<float> x_scales(scales_of_rows(subject), 0x1p-6F);
  NIBBLE_ASSIGN_OR_RETURN(subject.x_scales, DeviceMemory::allocate(x_scales.size() * 4));
  NIBBLE_ASSIGN_OR_RETURN(subject.y, DeviceMemory::allocate(results * 2));
  NIBBLE_ASSIGN_OR_RETURN(subject.expected, DeviceMemory::allocate(results * 2));
  NIBBLE_ASSIGN_OR_RETURN(subject.sums, DeviceMemory::allocate(2 * sizeof(double)));
  cudaStream_t stream = timer.stream();
  const auto fill = [&]() -> cudaError_t {
    cudaError_t error = random_codes(format.code, subject.codes.as<void>(), code_bytes, 1, stream);
    if (error == cudaSuccess && scales > 0) {
      error = random_scales(subject.scales.as<float>(), scales,
                            format.scale_dtype == DType::kF8E8M0, 2, stream);
    }
    if (error == cudaSuccess && format.zero_points == ZeroPoints::kMinimum) {
      const float* given = subject.scales.as<float>();
      error = matching_minimums(given, scales, subject.scales.as<float>() + scales, stream);
    } else if (error == cudaSuccess && zeros) {
      error = cudaMemsetAsync(subject.scales.as<float>() + scales, 0, scales * 4, stream);
    }
    if (error == cudaSuccess) {
      error = fill_activations(subject, x_scales, values, stream);
    }
    return error != cudaSuccess ? error
                                : decode_to_bf16({.format = format,
                                                  .codes = subject.codes.as<void>(),
                                                  .scales = subject.scales.as<float>(),
                                                  .out = subject.decoded.as<void>(),
                                                  .n = shape.n,
                                                  .k = shape.k,
                                                  .row_bytes = row_bytes},
                                                 stream);
  };
  NIBBLE_RETURN_IF_ERROR(check(fill(), "filling a benchmark's matrices"));
  NIBBLE_RETURN_IF_ERROR(timer.wait());
  return subject;
}

Result<Candidate> make_candidate(const GemmEntry& entry,
                                 const GemmProblem& problem,
                                 const Subject& subject,
                                 const DeviceInfo& device,
                                 Timer& timer) {
  Candidate candidate;
  candidate.name = entry.name;
  NIBBLE_ASSIGN_OR_RETURN(candidate.kernel, entry.make(problem, device));
  const GemmKernel& kernel = *candidate.kernel;
  candidate.stride = (kernel.packed_bytes() + 1023) / 1024 * 1024;
  candidate.copies =
      std::max<int64_t>(2, static_cast<int64_t>(3 * device.l2_bytes / candidate.stride) + 1);
  NIBBLE_ASSIGN_OR_RETURN(
      candidate.packed,
      DeviceMemory::allocate(candidate.stride * static_cast<size_t>(candidate.copies)));
  NIBBLE_ASSIGN_OR_RETURN(candidate.workspace,
                          DeviceMemory::allocate(kernel.workspace_bytes(subject.max_m)));
  candidate.yardstick = problem.weight.code == WeightCode::kBf16 && entry.name == kYardstick;
  const void* codes = candidate.yardstick ? subject.decoded.as<void>() : subject.codes.as<void>();
  for (int64_t copy = 0; copy < candidate.copies; ++copy) {
    auto* packed = candidate.packed.as<std::byte>() + static_cast<size_t>(copy) * candidate.stride;
    NIBBLE_RETURN_IF_ERROR(
        check(kernel.pack(codes, subject.scales.as<float>(), packed, timer.stream()),
              candidate.name + ": packing weights"));
  }
  NIBBLE_RETURN_IF_ERROR(timer.wait().with_context(candidate.name + ": packing weights"));
  return candidate;
}

cudaError_t run_once(const Candidate& candidate,
                     const Subject& subject,
                     int64_t m,
                     int64_t copy,
                     void* y,
                     cudaStream_t stream) {
  const void* x = candidate.yardstick ? subject.x_bf16.as<void>() : subject.x.as<void>();
  return candidate.kernel->run(
      {.x = x,
       .x_scales = subject.x_scales.as<float>(),
       .blocks = subject.blocks != nullptr ? &subject.blocks->view() : nullptr,
       .packed = candidate.packed.as<std::byte>() + static_cast<size_t>(copy) * candidate.stride,
       .y = y,
       .y_stride = subject.shape.n,
       .m = m,
       .workspace = candidate.workspace.as<void>()},
      {.stream = stream});
}

/// Launches in a graph at m rows: every copy of the weights equally often.
int64_t launches_at(const Candidate& candidate, int64_t m) {
  const int64_t least = m <= kShortRows ? kShortLaunches : kLongLaunches;
  return (least + candidate.copies - 1) / candidate.copies * candidate.copies;
}

/// Records launches that take the copies of the weights in turn, and runs them once.
Status record(Candidate& candidate, const Subject& subject, int64_t m, Timer& timer) {
  NIBBLE_ASSIGN_OR_RETURN(candidate.launches, timer.record([&]() -> Status {
    for (int64_t i = 0; i < launches_at(candidate, m); ++i) {
      NIBBLE_RETURN_IF_ERROR(check(run_once(candidate, subject, m, i % candidate.copies,
                                            subject.y.as<void>(), timer.stream()),
                                   candidate.name));
    }
    return {};
  }));
  NIBBLE_RETURN_IF_ERROR(candidate.launches.launch(timer.stream()).with_context(candidate.name));
  return timer.wait().with_context(candidate.name);
}

/// ‖y − expected‖ / ‖expected‖ of one launch into poisoned memory; NaN if an element is missing.
Result<double> measure_error(const Candidate& candidate,
                             const Subject& subject,
                             int64_t m,
                             Timer& timer) {
  cudaStream_t stream = timer.stream();
  const auto count = static_cast<size_t>(m * subject.shape.n);
  void* y = candidate.yardstick ? subject.expected.as<void>() : subject.y.as<void>();
  NIBBLE_RETURN_IF_ERROR(check(cudaMemsetAsync(y, 0xff, count * 2, stream), "poisoning"));
  NIBBLE_RETURN_IF_ERROR(
      check(cudaMemsetAsync(subject.sums.as<void>(), 0, 2 * sizeof(double), stream), "clearing"));
  NIBBLE_RETURN_IF_ERROR(check(run_once(candidate, subject, m, 0, y, stream), candidate.name));
  NIBBLE_RETURN_IF_ERROR(
      check(compare_bf16(y, subject.expected.as<void>(), count, subject.sums.as<double>(), stream),
            "comparing results"));
  NIBBLE_RETURN_IF_ERROR(timer.wait().with_context(candidate.name));
  double sums[2] = {};
  NIBBLE_RETURN_IF_ERROR(
      check(cudaMemcpy(sums, subject.sums.as<void>(), sizeof(sums), cudaMemcpyDeviceToHost),
            "reading results"));
  return std::sqrt(sums[0] / sums[1]);
}

double tops_of(const GemmCeilings& ceilings, ActFormat act) {
  switch (act) {
    case ActFormat::kInt8Token:
    case ActFormat::kIntBlocks:
    case ActFormat::kBf16Blocks:
      return ceilings.int8_tops;
    case ActFormat::kFp8Token:
    case ActFormat::kFp8Group:
      return ceilings.fp8_tops;
    default:
      return ceilings.bf16_tops;
  }
}

GemmTiming summarize(const Candidate& candidate,
                     const Subject& subject,
                     int64_t m,
                     const GemmCeilings& ceilings) {
  GemmTiming timing{.kernel = candidate.name,
                    .scheme = std::string(subject.scheme.name),
                    .m = m,
                    .shape = subject.shape,
                    .us = median(candidate.us)};
  const double operations = 2.0 * static_cast<double>(m * subject.shape.n * subject.shape.k);
  timing.tbps = subject.weight_bytes / timing.us * 1e-6;
  timing.tops = operations / timing.us * 1e-6;
  const double bound = std::max(subject.weight_bytes / ceilings.read_tbps,
                                operations / tops_of(ceilings, subject.act)) *
                       1e-6;
  timing.roofline_percent = 100.0 * bound / timing.us;
  return timing;
}

/// All candidates at one m, replayed in turns.
Status bench_rows(std::vector<Candidate>& candidates,
                  const Subject& subject,
                  int64_t m,
                  const GemmBenchOptions& options,
                  Timer& timer,
                  GemmBenchReport& report) {
  std::vector<double> errors;
  for (Candidate& candidate : candidates) {  // the yardstick comes first
    NIBBLE_ASSIGN_OR_RETURN(const double error, measure_error(candidate, subject, m, timer));
    errors.push_back(error);
    NIBBLE_RETURN_IF_ERROR(record(candidate, subject, m, timer));
    candidate.us.clear();
  }
  for (int replay = 0; replay < options.replays; ++replay) {
    for (Candidate& candidate : candidates) {
      NIBBLE_ASSIGN_OR_RETURN(const double us, timer.replay(candidate.launches));
      std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(options.rest * us));
      candidate.us.push_back(us / static_cast<double>(launches_at(candidate, m)));
    }
  }
  for (size_t i = 0; i < candidates.size(); ++i) {
    candidates[i].launches = {};
    GemmTiming timing = summarize(candidates[i], subject, m, report.ceilings);
    timing.vs_bf16 = median(candidates[0].us) / timing.us;
    timing.error = errors[i];
    if (i > 0 || subject.scheme.name == "bf16") {
      report.timings.push_back(timing);
      if (options.progress) {
        options.progress(timing);
      }
    }
    if (!(errors[i] <= kMaxError)) {  // NaN too
      return make_error(StatusCode::kUnavailable,
                        "{} at m {} n {} k {}: result differs from BF16's by {:.3g}",
                        candidates[i].name, m, subject.shape.n, subject.shape.k, errors[i]);
    }
  }
  return {};
}

template <typename T>
bool listed(const std::vector<T>& list, std::string_view name) {
  return list.empty() || std::find(list.begin(), list.end(), name) != list.end();
}

/// Whether an entry is to be timed at a problem that it may not take.
bool chosen(const GemmEntry& entry,
            const GemmProblem& problem,
            const DeviceInfo& device,
            const GemmBenchOptions& options) {
  const auto is_older = [](const GemmEntry& each) { return each.name.ends_with("_sm80"); };
  if (!entry.accepts(problem, device) || !listed(options.kernels, entry.name)) {
    return false;
  }
  const bool any_older = options.older == GemmBenchOptions::Older::kAll || !options.kernels.empty();
  return any_older || !is_older(entry) ||
         std::ranges::none_of(options.entries, [&](const GemmEntry& other) {
           return !is_older(other) && other.accepts(problem, device);
         });
}

/// The yardstick, then every chosen kernel that takes the scheme at this shape.
Result<std::vector<Candidate>> make_candidates(const Subject& subject,
                                               const DeviceInfo& device,
                                               const GemmBenchOptions& options,
                                               Timer& timer) {
  const GemmProblem problem{.weight = subject.scheme.weight,
                            .act = subject.act,
                            .n = subject.shape.n,
                            .k = subject.shape.k,
                            .blocks = subject.spec.blocks};
  const GemmProblem bf16{
      .weight = {}, .act = ActFormat::kBf16, .n = subject.shape.n, .k = subject.shape.k};
  std::vector<Candidate> candidates;
  for (const GemmEntry& entry : options.entries) {
    if (entry.name == kYardstick) {
      NIBBLE_ASSIGN_OR_RETURN(auto yardstick, make_candidate(entry, bf16, subject, device, timer));
      candidates.insert(candidates.begin(), std::move(yardstick));
    } else if (chosen(entry, problem, device, options)) {
      NIBBLE_ASSIGN_OR_RETURN(auto candidate,
                              make_candidate(entry, problem, subject, device, timer));
      candidates.push_back(std::move(candidate));
    }
  }
  return candidates;
}

/// Whether an entry of the registry takes the scheme at this shape.
bool taken(const QuantScheme& scheme,
           GemmShape shape,
           const DeviceInfo& device,
           const GemmBenchOptions& options) {
  const GemmProblem problem{.weight = scheme.weight,
                            .act = scheme.act == ActFormat::kFloat ? ActFormat::kBf16 : scheme.act,
                            .n = shape.n,
                            .k = shape.k};
  const auto entries = options.entries;
  return std::any_of(entries.begin(), entries.end(), [&](const GemmEntry& entry) {
    return chosen(entry, problem, device, options);
  });
}

}  // namespace

std::vector<GemmShape> standard_gemm_shapes() {
  return {{28672, 8192}, {8192, 8192},  {4096, 14336}, {6144, 4096},
          {4096, 4096},  {28672, 4096}, {128256, 4096}};
}

std::vector<int64_t> standard_gemm_rows() { return {1, 4, 16, 64, 128, 256, 1024, 4096}; }

Result<double> measure_read_tbps(const DeviceInfo& device) {
  constexpr size_t kBytes = size_t{4} << 30;
  NIBBLE_ASSIGN_OR_RETURN(const auto timer, Timer::make());
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory memory, DeviceMemory::allocate(kBytes));
  NIBBLE_RETURN_IF_ERROR(
      check(random_codes(WeightCode::kInt4, memory.as<void>(), kBytes, 4, timer->stream()),
            "filling a benchmark's memory"));
  std::vector<double> us;
  for (int replay = 0; replay < 8; ++replay) {
    NIBBLE_ASSIGN_OR_RETURN(const double time, timer->time([&] {
      return check(read_all(memory.as<void>(), kBytes, device.sms, timer->stream()), "reading");
    }));
    us.push_back(time);
  }
  us.erase(us.begin());  // the first waits for the fill
  return static_cast<double>(kBytes) / median(us) * 1e-6;
}

Result<GemmBenchReport> bench_gemms(const DeviceInfo& device, const GemmBenchOptions& options) {
  GemmBenchReport report;
  if (options.row_counts.empty()) {
    return report;
  }
  NIBBLE_RETURN_IF_ERROR(check(cudaSetDevice(device.index), "choosing a GPU"));
  NIBBLE_ASSIGN_OR_RETURN(report.ceilings.read_tbps, measure_read_tbps(device));
  NIBBLE_ASSIGN_OR_RETURN(const auto timer, Timer::make());
  const std::span<const QuantScheme> schemes =
      options.schemes.empty() ? all_schemes() : options.schemes;
  for (const QuantScheme& scheme : schemes) {
    for (const GemmShape shape : options.shapes) {
      if (!taken(scheme, shape, device, options)) {
        continue;
      }
      NIBBLE_ASSIGN_OR_RETURN(const Subject subject, make_subject(scheme, shape, options, *timer));
      NIBBLE_ASSIGN_OR_RETURN(auto candidates, make_candidates(subject, device, options, *timer));
      for (const int64_t m : options.row_counts) {
        NIBBLE_RETURN_IF_ERROR(bench_rows(candidates, subject, m, options, *timer, report));
      }
    }
  }
  return report;
}

}  // namespace nibble::cuda
