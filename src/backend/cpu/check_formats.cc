#include <string>

#include "backend/cpu/packing.h"
#include "quant/scheme.h"

namespace nibble::cpu {
namespace {

// What there are no kernels for, whatever the shape; null when there are.
const char* missing_kernels(const WeightFormat& format, ActFormat act) {
  const bool to_integers = act == ActFormat::kInt8Token;
  if (format.zero_points != ZeroPoints::kNone && to_integers) {
    return "weights with zero points and int8 activations";
  }
  if (format.code == WeightCode::kFp4E2M1 &&
      (to_integers || act == ActFormat::kFp8Token || act == ActFormat::kFp8Group)) {
    return "fp4 weights with 8-bit activations";
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
  const bool grouped = format.grouped() && format.group_size < k;
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
  if (act == ActFormat::kFp8Group && format.code != WeightCode::kFp8E4M3) {
    return make_error(StatusCode::kUnsupported,
                      "fp8 activations need fp8 weights; quantize to these, or run with float "
                      "activations");
  }
  const int group = format.group_size;
  if (grouped && k % group != 0) {
    return make_error(StatusCode::kUnsupported,
                      "{} input channels are no multiple of the group or block size {}: this "
                      "backend has no kernels for a part of a group; quantize the model again, "
                      "with --scheme and one of {}",
                      k, group, schemes_that_run());
  }
  if (grouped &&
      (group % kStepColumns != 0 || (group % kMaxBlock != 0 && kMaxBlock % group != 0))) {
    return make_error(StatusCode::kUnsupported,
                      "group size {}: this backend takes 8, 16, 32 and multiples of 32", group);
  }
  return {};
}

}  // namespace nibble::cpu
