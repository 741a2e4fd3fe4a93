#include <algorithm>
#include <string>

#include "backend/cpu/registry.h"
#include "quant/levels.h"

namespace nibble::cpu {
namespace {

// What there are no kernels for, whatever the shape; null when there are.
const char* missing_kernels(const WeightFormat& format, ActFormat act) {
  const bool to_integers = is_integer(act);
  const bool levels =
      in_two_levels(format, act) && (format.group_size == 64 || format.group_size == 128);
  if (format.zero_points == ZeroPoints::kPerScale && to_integers && !levels) {
    return "weights with zero points and int8 activations but int4 in groups of 64 or 128";
  }
  if (format.zero_points == ZeroPoints::kMinimum &&
      (to_integers || format.code != WeightCode::kInt4)) {
    return "weights with minimums but int4 with float activations";
  }
  if (format.code == WeightCode::kFp4E2M1 && to_integers) {
    return "fp4 weights with int8 activations";
  }
  if (format.code == WeightCode::kFp4E2M1 && act == ActFormat::kFp8Group) {
    return "fp4 weights with fp8 activations that are scaled in groups";
  }
  return nullptr;
}

std::string schemes_that_run(const GemmDevice& device) {
  constexpr int64_t kUsual = 1024;  // channels that every scheme's groups divide
  std::string names;
  for (const QuantScheme& scheme : all_schemes()) {
    const GemmProblem problem{scheme.weight, scheme.act, kUsual, kUsual};
    if (std::ranges::any_of(gemm_entries(), [&](const GemmEntry& entry) {
          return entry.accepts(problem, device);
        })) {
      names += (names.empty() ? "" : ", ") + std::string(scheme.name);
    }
  }
  return names;
}

}  // namespace

Status refuse_product(const GemmProblem& problem, const GemmDevice& device) {
  if (const char* missing = missing_kernels(problem.weight, problem.act)) {
    return make_error(StatusCode::kUnsupported,
                      "this backend has no kernels for {}; quantize the model again, with "
                      "--scheme and one of {}",
                      missing, schemes_that_run(device));
  }
  if (problem.act == ActFormat::kIntBlocks) {
    return make_error(StatusCode::kUnsupported,
                      "activations in blocks of 4 and 8 bits need int4 weights with one scale per "
                      "output channel, or in groups of 32, 64 or 128 that divide the {} input "
                      "channels; quantize to {}, or run with --ignore-fmpq",
                      problem.k, schemes_that_run(device));
  }
  if (problem.act == ActFormat::kBf16Blocks) {
    return make_error(
        StatusCode::kUnsupported,
        "activations in blocks of 8 bits and of BF16 need int4 weights with one scale "
        "per output channel; quantize to {}, or run with --ignore-fmpq",
        schemes_that_run(device));
  }
  if (problem.act == ActFormat::kInt8Token && problem.weight.zero_points == ZeroPoints::kNone) {
    return make_error(StatusCode::kUnsupported,
                      "int8 activations need int8 or int4 weights with one scale per output "
                      "channel; quantize to one of these, or run with float activations");
  }
  const WeightFormat& format = problem.weight;
  if (problem.act == ActFormat::kFp8Token && format.code != WeightCode::kFp4E2M1) {
    return make_error(StatusCode::kUnsupported,
                      "fp8 activations need fp8 weights with one scale per output channel, or fp4 "
                      "weights; quantize to these, or run with float activations");
  }
  if (problem.act == ActFormat::kFp8Group && format.code != WeightCode::kFp8E4M3) {
    return make_error(StatusCode::kUnsupported,
                      "fp8 activations need fp8 weights; quantize to these, or run with float "
                      "activations");
  }
  if (problem.k % format.group_size != 0) {
    return make_error(StatusCode::kUnsupported,
                      "{} input channels are no multiple of the group size {}; quantize the model "
                      "again, with --scheme and one of {}",
                      problem.k, format.group_size, schemes_that_run(device));
  }
  return make_error(StatusCode::kUnsupported,
                    "group size {}: this backend takes 8, 16, 32 and multiples of 32",
                    format.group_size);
}

}  // namespace nibble::cpu
