#include <string>

#include "backend/cpu/packing.h"
#include "quant/scheme.h"

namespace nibble::cpu {
namespace {

// What there are no kernels for, whatever the shape; null when there are.
const char* missing_kernels(const WeightFormat& format, ActFormat act) {
  if (format.zero_points != ZeroPoints::kNone) {
    return "weights with zero points";
  }
  if (format.code == WeightCode::kFp4E2M1) {
    return "fp4 weights";
  }
  if (format.scale_per == ScalePer::kBlock || act == ActFormat::kFp8Group) {
    return "fp8 weights with a scale per block";
  }
  if (format.scale_per == ScalePer::kTensor) {
    return "weights with one scale for the matrix, unless it is repeated per channel";
  }
  return nullptr;
}

std::string schemes_that_run() {
  std::string names;
  for (const QuantScheme& scheme : all_schemes()) {
    if (missing_kernels(scheme.weight, scheme.act) == nullptr) {
      names += (names.empty() ? "" : ", ") + std::string(scheme.name);
    }
  }
  return names;
}

}  // namespace

Status check_formats(const WeightFormat& format, ActFormat act, int64_t k) {
  if (const char* missing = missing_kernels(format, act)) {
    return make_error(StatusCode::kUnsupported,
                      "this backend has no kernels for {}; quantize the model again, with "
                      "--scheme and one of {}",
                      missing, schemes_that_run());
  }
  const bool integer = format.code == WeightCode::kInt8 || format.code == WeightCode::kInt4;
  const bool grouped = format.scale_per == ScalePer::kGroup && format.group_size != k;
  if (act == ActFormat::kInt8Token && (!integer || format.groups(k) != 1)) {
    return make_error(StatusCode::kUnsupported,
                      "int8 activations need int8 or int4 weights with one scale per output "
                      "channel; quantize to one of these, or run with float activations");
  }
  if (act == ActFormat::kFp8Token &&
      (format.code != WeightCode::kFp8E4M3 || format.groups(k) != 1)) {
    return make_error(StatusCode::kUnsupported,
                      "fp8 activations need fp8 weights with one scale per output channel; "
                      "quantize to these, or run with float activations");
  }
  const int group = format.group_size;
  if (grouped &&
      (group % kStepColumns != 0 || (group % kMaxBlock != 0 && kMaxBlock % group != 0))) {
    return make_error(StatusCode::kUnsupported,
                      "group size {}: this backend takes 8, 16, 32 and multiples of 32", group);
  }
  return {};
}

}  // namespace nibble::cpu
