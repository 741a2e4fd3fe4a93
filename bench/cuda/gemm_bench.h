#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "backend/cuda/device_info.h"
#include "backend/cuda/gemm_kernel.h"
#include "base/json.h"
#include "base/status.h"
#include "bench/kernels/kernel_bench.h"

namespace nibble::cuda {

struct GemmShape {
  int64_t n = 0;  // output channels
  int64_t k = 0;  // input channels
};

/// One kernel at one shape and m.
struct GemmTiming {
  std::string kernel;
  std::string scheme;
  int64_t m = 0;
  GemmShape shape;
  double us = 0;                // median
  double tbps = 0;              // TB/s of codes and scales as the scheme counts them, read once
  double tops = 0;              // two operations per weight and row
  double roofline_percent = 0;  // of the slower of: reading weights once, all operations
  double vs_bf16 = 0;           // time of cuBLASLt in BF16 on this shape in the same run over ours
  double error = 0;  // ‖y − y of BF16‖ / ‖y of BF16‖: rounding only, below 0.01
};

/// Rates that bound every kernel. `read_tbps` is measured in each run, the products' are the
/// sustained rates of bare wgmma loops over random data on an H200 (250 ms, medians).
struct GemmCeilings {
  double read_tbps = 0;
  double bf16_tops = 860;
  double fp8_tops = 1660;
  double int8_tops = 1880;
};

struct GemmBenchOptions {
  /// Kernels that are meant for GPUs before Hopper.
  enum class Older : uint8_t { kAll, kWhereNothingElse };

  std::span<const GemmEntry> entries;  // of the registry
  std::vector<QuantScheme> schemes;    // none: all that a kernel takes
  std::vector<std::string> kernels;    // names of entries; none: all
  Older older = Older::kAll;           // of those, where no names are given
  std::vector<GemmShape> shapes;
  std::vector<int64_t> row_counts;  // each m
  int replays = 9;
  // Idle time after each replay, in its own lengths. At 0 replays follow each other, the power
  // limit of a GPU lowers its clocks, and figures depend on what ran before.
  double rest = KernelBenchOptions{}.rest;
  double a4_share = KernelBenchOptions{}.a4_share;
  std::function<void(const GemmTiming&)> progress;  // called as figures come in
};

struct GemmBenchReport {
  GemmCeilings ceilings;
  std::vector<GemmTiming> timings;
};

/// The shapes and row counts of the published tables.
[[nodiscard]] std::vector<GemmShape> standard_gemm_shapes();
[[nodiscard]] std::vector<int64_t> standard_gemm_rows();

/// Times every entry of the registry for the chosen schemes: launches captured in a CUDA graph,
/// which the GPU has in full before it begins, and chained by programmatic dependence as in a
/// decode step, over copies of the weights that together exceed three times the L2, random data,
/// replays of all kernels in turns. The same product runs through cuBLASLt in BF16 on the decoded
/// weights, both as the yardstick and as a check. Fails when memory is short, a kernel fails, or a
/// result is wrong by more than rounding.
Result<GemmBenchReport> bench_gemms(const DeviceInfo& device, const GemmBenchOptions& options);

/// The report of `nibble bench kernels` on a GPU: of the kernels that it would take, or of those
/// that `options` name. kInvalidArgument for one that takes none of the products.
Result<Json> bench_kernels(int device,
                           std::span<const GemmEntry> entries,
                           const KernelBenchOptions& options);

/// TB/s of a bare read of 4 GiB.
Result<double> measure_read_tbps(const DeviceInfo& device);

/// A timing as a line of a table, and the table's head.
[[nodiscard]] std::string gemm_timing_line(const GemmTiming& timing);
[[nodiscard]] std::string gemm_timing_head();

/// {"ceilings": {"read_tbps", ..}, "kernels": [{"name", "scheme", "isa", "m", "n", "k", "us",
/// "tbps", "tops", "roofline_percent", "vs_bf16"}]}
[[nodiscard]] Json gemm_bench_json(const DeviceInfo& device, const GemmBenchReport& report);

}  // namespace nibble::cuda
