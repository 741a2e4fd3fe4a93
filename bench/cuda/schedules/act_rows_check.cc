#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "bench/cuda/bench_data.h"
#include "bench/cuda/bench_timer.h"
#include "bench/cuda/schedules/act_rows.h"

namespace nibble::cuda {
namespace {

template <typename T>
Result<std::vector<T>> read_back(const DeviceMemory& from, size_t count) {
  std::vector<T> values(count);
  NIBBLE_RETURN_IF_ERROR(
      check(cudaMemcpy(values.data(), from.as<T>(), count * sizeof(T), cudaMemcpyDeviceToHost),
            "reading rows"));
  return values;
}

/// One row in double precision.
Status compare(const float* x, const std::vector<float>& weight, const int8_t* codes, float scale) {
  const size_t n = weight.size();
  double squares = 0.0, largest = 0.0;
  for (size_t i = 0; i < n; ++i) {
    squares += static_cast<double>(x[i]) * x[i];
  }
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + ActRows::kEps);
  for (size_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::abs(x[i] * factor * weight[i]));
  }
  const double expected = ActRows::kClip * largest / 7.0;
  if (!(std::abs(scale - expected) <= 1e-5 * expected)) {
    return make_error(StatusCode::kCorrupt, "the scale of a row is {}, not {}", scale, expected);
  }
  for (size_t i = 0; i < n; ++i) {
    const double exact = std::clamp(x[i] * factor * weight[i] / expected, -7.0, 7.0);
    if (!(std::abs(codes[i] - exact) <= 0.5 + 1e-4)) {
      return make_error(StatusCode::kCorrupt, "code {} of a row is {}, not {}", i, int{codes[i]},
                        exact);
    }
  }
  return {};
}

Status check_width(size_t n, cudaStream_t stream) {
  constexpr size_t kRows = 5;
  const size_t count = kRows * n;
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory x, DeviceMemory::allocate(count * 4));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory weight, DeviceMemory::allocate(n * 4));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory bytes, DeviceMemory::allocate(count));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory nibbles, DeviceMemory::allocate(count / 2));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory scales, DeviceMemory::allocate(2 * kRows * 4));
  // The higher halves of F32 numbers are those of BF16.
  NIBBLE_RETURN_IF_ERROR(
      check(random_activations(ActFormat::kBf16, x.as<void>(), 2 * count, n, stream), "filling"));
  NIBBLE_RETURN_IF_ERROR(check(random_scales(weight.as<float>(), n, false, 7, stream), "filling"));
  ActRows rows{.x = x.as<float>(),
               .weight = weight.as<float>(),
               .rows = kRows,
               .n = static_cast<int64_t>(n),
               .codes = bytes.as<void>(),
               .scales = scales.as<float>()};
  NIBBLE_RETURN_IF_ERROR(check(write_act_rows(rows, {.stream = stream}), "writing rows"));
  rows.store = ActStore::kNibbles;
  rows.codes = nibbles.as<void>();
  rows.scales += kRows;
  NIBBLE_RETURN_IF_ERROR(check(write_act_rows(rows, {.stream = stream}), "writing rows"));
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "writing rows"));
  NIBBLE_ASSIGN_OR_RETURN(const auto host_x, read_back<float>(x, count));
  NIBBLE_ASSIGN_OR_RETURN(const auto host_weight, read_back<float>(weight, n));
  NIBBLE_ASSIGN_OR_RETURN(const auto codes, read_back<int8_t>(bytes, count));
  NIBBLE_ASSIGN_OR_RETURN(const auto words, read_back<uint32_t>(nibbles, count / 8));
  NIBBLE_ASSIGN_OR_RETURN(const auto host_scales, read_back<float>(scales, 2 * kRows));
  for (size_t row = 0; row < kRows; ++row) {
    NIBBLE_RETURN_IF_ERROR(
        compare(host_x.data() + row * n, host_weight, codes.data() + row * n, host_scales[row]));
    if (host_scales[row] != host_scales[kRows + row]) {
      return make_error(StatusCode::kCorrupt, "two scales of row {} differ", row);
    }
  }
  for (size_t i = 0; i < words.size(); ++i) {
    uint32_t eight[2];
    std::memcpy(eight, codes.data() + 8 * i, sizeof(eight));
    if (words[i] != join_nibbles(eight[0], eight[1])) {
      return make_error(StatusCode::kCorrupt, "codes {} and on differ in the way of storing",
                        8 * i);
    }
  }
  std::printf("rows of %6zu in bytes and in nibbles: same codes\n", n);
  return {};
}

}  // namespace

Status check_act_rows(cudaStream_t stream) {
  for (const size_t n : {8, 1000, 4096, 8192, 14336}) {
    if (Status right = check_width(n, stream); !right.ok()) {
      return right.with_context(fmt::format("rows of {}", n));
    }
  }
  return {};
}

}  // namespace nibble::cuda
