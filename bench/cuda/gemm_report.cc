#include <algorithm>
#include <string>
#include <utility>

#include "bench/cuda/gemm_bench.h"

// What is printed and returned of bench_gemms().

namespace nibble::cuda {

Result<Json> bench_kernels(int device,
                           std::span<const GemmEntry> entries,
                           const KernelBenchOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const DeviceInfo info, query_device(device));
  GemmBenchOptions chosen{.entries = entries,
                          .schemes = options.schemes,
                          .kernels = options.kernels,
                          .shapes = standard_gemm_shapes(),
                          .row_counts = options.row_counts,
                          .rest = options.rest,
                          .a4_share = options.a4_share};
  if (!options.shapes.empty()) {
    chosen.shapes.clear();
    for (const auto& [n, k] : options.shapes) {
      chosen.shapes.push_back({n, k});
    }
  }
  if (info.hopper()) {  // what would run
    chosen.older = GemmBenchOptions::Older::kWhereNothingElse;
  }
  if (chosen.row_counts.empty()) {
    chosen.row_counts = standard_gemm_rows();
  }
  if (options.progress) {
    chosen.progress = [&options](const GemmTiming& timing) {
      options.progress(gemm_timing_line(timing));
    };
  }
  NIBBLE_ASSIGN_OR_RETURN(const GemmBenchReport report, bench_gemms(info, chosen));
  for (const std::string& kernel : options.kernels) {
    if (std::ranges::find(report.timings, kernel, &GemmTiming::kernel) == report.timings.end()) {
      return make_error(StatusCode::kInvalidArgument,
                        "--kernel {}: it takes none of the products; choose another --scheme or "
                        "shape, or leave it out",
                        kernel);
    }
  }
  return gemm_bench_json(info, report);
}

std::string gemm_timing_head() {
  return fmt::format("{:22} {:12} {:>5} {:>13} {:>9} {:>6} {:>7} {:>6} {:>6} {:>8}", "kernel",
                     "scheme", "m", "n x k", "us", "TB/s", "TOPS", "roof%", "x bf16", "error");
}

std::string gemm_timing_line(const GemmTiming& t) {
  return fmt::format("{:22} {:12} {:5} {:7}x{:5} {:9.2f} {:6.2f} {:7.1f} {:6.1f} {:6.2f} {:8.1e}",
                     t.kernel, t.scheme, t.m, t.shape.n, t.shape.k, t.us, t.tbps, t.tops,
                     t.roofline_percent, t.vs_bf16, t.error);
}

Json gemm_bench_json(const DeviceInfo& device, const GemmBenchReport& report) {
  const std::string isa = "sm_" + std::to_string(device.major) + std::to_string(device.minor);
  JsonArray kernels;
  for (const GemmTiming& timing : report.timings) {
    kernels.push_back(Json::object({{"name", timing.kernel},
                                    {"scheme", timing.scheme},
                                    {"isa", isa},
                                    {"m", timing.m},
                                    {"n", timing.shape.n},
                                    {"k", timing.shape.k},
                                    {"us", timing.us},
                                    {"tbps", timing.tbps},
                                    {"tops", timing.tops},
                                    {"roofline_percent", timing.roofline_percent},
                                    {"vs_bf16", timing.vs_bf16}}));
  }
  return Json::object({{"device", device.name},
                       {"ceilings", Json::object({{"read_tbps", report.ceilings.read_tbps},
                                                  {"bf16_tops", report.ceilings.bf16_tops},
                                                  {"fp8_tops", report.ceilings.fp8_tops},
                                                  {"int8_tops", report.ceilings.int8_tops}})},
                       {"kernels", std::move(kernels)}});
}

}  // namespace nibble::cuda
