#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "bench/ceilings/ceilings.h"
#include "bench/quartiles.h"

namespace nibble {

struct GemmShape {
  int64_t n = 0;  // output channels
  int64_t k = 0;  // input channels
};

struct GemmTiming {
  std::string scheme;
  std::string kernel;
  int64_t m = 0;
  GemmShape shape;
  double us = 0;        // median
  double input_us = 0;  // of us: rounding the activations
  double gbps = 0;      // bytes of the weights a second
  double tops = 0;      // two operations per weight and row
  // Of the slower of: reading the weights once, all operations. Of the timings, each
  // compared with the mean of the ceiling directly before and directly after it.
  Quartiles roofline_percent;
  double speed = 1;  // times of the first scheme over these, timing by timing: the median
};

struct GemmBenchOptions {
  std::string_view isa;              // of the backend
  std::vector<GemmShape> shapes;     // measured in turns
  std::vector<int64_t> row_counts;   // each m
  std::vector<std::string> kernels;  // only products that take one of these; none: all
  double a4_share = 0.75;            // of schemes in blocks: those with the fewer bits
  cpu::NearCeilings* ceilings = nullptr;
};

/// Times the products of schemes as a model of BF16 runs them: activations and results are BF16.
/// Weights and activations are random; the weights come from memory, because the runs of a scheme
/// go round copies of more than 400 MB. At least 9 timings of each shape and m, those of all
/// schemes in turns, so that a host that changes its speed touches them alike; none where a product
/// takes none of `kernels`. `backend` is the CPU's.
Result<std::vector<GemmTiming>> bench_gemm(Backend& backend,
                                           std::span<const QuantScheme> schemes,
                                           const GemmBenchOptions& options);

}  // namespace nibble
