#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/cuda/row_kernels.h"
#include "backend/cuda/self_check.h"
#include "backend/cuda/self_check_data.h"
#include "base/f16.h"
#include "quant/hadamard.h"

namespace nibble::cuda {
namespace {

constexpr uint32_t kSeed = 23;
constexpr int64_t kRows = 3;

/// What becomes of gate_up [kRows, 2 k], in double precision.
std::vector<double> turned_rows(const std::vector<uint16_t>& gate_up, int64_t turn, int64_t k) {
  std::vector<double> rows(static_cast<size_t>(kRows * k));
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      const auto gate = static_cast<size_t>(2 * row * k + i);
      rows[static_cast<size_t>(row * k + i)] =
          exact_activation(GemmInput::Kind::kSiluMul, bf16_to_f32(gate_up[gate]),
                           bf16_to_f32(gate_up[gate + static_cast<size_t>(k)]));
    }
    turn_blocks(rows.data() + row * k, k, turn);
  }
  return rows;
}

}  // namespace

Status SelfCheck::check_turned(int64_t turn, int64_t k) {
  if (!turned_.emplace(turn, k).second) {
    return {};
  }
  const auto start = std::chrono::steady_clock::now();
  const std::vector<uint16_t> gate_up = random_bf16(static_cast<size_t>(2 * kRows * k), kSeed);
  const std::vector<double> wanted = turned_rows(gate_up, turn, k);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer device_gate_up, device_copy(gate_up));
  for (const ActFormat format : {ActFormat::kBf16, ActFormat::kInt8Token}) {
    const bool int8 = format == ActFormat::kInt8Token;
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer values, poisoned_device(wanted.size() * 2));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer scales, poisoned_device(kRows * sizeof(float)));
    NIBBLE_RETURN_IF_ERROR(
        check(activation_quantize({.x = device_gate_up.as<void>(),
                                   .rows = kRows,
                                   .n = k,
                                   .out = {format, values.as<void>(), scales.as<float>()},
                                   .turn = turn},
                                  {stream_}),
              "turning activations"));
    NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream_), "turning activations"));
    std::vector<std::byte> bytes(wanted.size() * (int8 ? 1 : 2));
    std::vector<float> steps(kRows, 1.0F);
    NIBBLE_RETURN_IF_ERROR(copy_back(values, 0, std::span(bytes)));
    if (int8) {
      NIBBLE_RETURN_IF_ERROR(copy_back(scales, 0, std::span(steps)));
    }
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double step = steps[i / static_cast<size_t>(k)];
      uint16_t half = 0;
      std::memcpy(&half, bytes.data() + (int8 ? i : 2 * i), int8 ? 1 : 2);
      const double got = int8 ? static_cast<int8_t>(half) * step : bf16_to_f32(half);
      // Half a code, and what silu is short of bits before INT8, in as many sums as are turned.
      const double bound = int8 ? 0.51 * step + 1e-3 : std::fabs(wanted[i]) * 0x1p-8 + 1e-5;
      if (!(std::fabs(got - wanted[i]) <= bound)) {
        return make_error(
            StatusCode::kUnavailable,
            "self-test: kernel turned_activation is wrong on this GPU: of rows of {} in blocks of "
            "{}, element {} is {:.6g} instead of {:.6g}; serve with --device cpu, and report it",
            k, turn, i % static_cast<size_t>(k), got, wanted[i]);
      }
    }
  }
  finish("turned rows", start);
  return {};
}

}  // namespace nibble::cuda
