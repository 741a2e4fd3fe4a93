#include "backend/cuda/calibration/calibration_work.h"

#include <algorithm>
#include <array>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

/// Columns of H that are one product: those in front of them are left out above the diagonal.
constexpr int64_t kSumColumns = 1024;

}  // namespace

Result<std::unique_ptr<CalibrationWork>> CalibrationWork::create(cudaStream_t stream) {
  std::unique_ptr<CalibrationWork> work(new CalibrationWork(stream));
  NIBBLE_ASSIGN_OR_RETURN(work->matmul, Matmul::create(stream));
  NIBBLE_RETURN_IF_ERROR(room(work->failed, sizeof(int32_t), "a flag"));
  NIBBLE_RETURN_IF_ERROR(room(work->parts, kSumsOfErrors * kDotParts * 8, "sums"));
  NIBBLE_RETURN_IF_ERROR(room(work->inverse, kFactorBlock * kFactorBlock * 4, "a factor"));
  return work;
}

Status CalibrationWork::room(DeviceBuffer& buffer, int64_t bytes, std::string_view what) {
  if (static_cast<int64_t>(buffer.size()) < bytes) {
    buffer = DeviceBuffer();
    NIBBLE_ASSIGN_OR_RETURN(buffer, allocate_device(static_cast<size_t>(bytes), what));
  }
  return {};
}

SplitRows CalibrationWork::prepare(InputRounding rounding) {
  if (rounding.nothing_to_do()) {
    must(round_input(rounding, {stream, false}));  // its checks
    return {rounding.x.data, nullptr};
  }
  const int64_t count = rounding.rows;
  must(room(rounded, count * rounding.k * 2, "rows of a calibration"));
  must(room(row_scales, count * cuda::row_scales(rounding.out.format, rounding.k) * 4,
            "scales of rows"));
  rounding.out.values = rounded.as<void>();
  rounding.out.scales = row_scales.as<float>();
  must(round_input(rounding, {stream, false}));
  return split(rounding.out, count, rounding.k);
}

const void* CalibrationWork::prepare_wanted(InputRounding rounding) {
  rounding.out = {.format = ActFormat::kBf16};
  if (!rounding.nothing_to_do()) {
    must(room(wanted, rounding.rows * rounding.k * 2, "rows of a calibration"));
    rounding.out.values = wanted.as<void>();
  }
  must(round_input(rounding, {stream, false}));
  return rounding.nothing_to_do() ? rounding.x.data : wanted.as<void>();
}

SplitRows CalibrationWork::split(const QuantizedRows& rows, int64_t count, int64_t k) {
  if (cuda::row_scales(rows.format, k) == 0) {
    return {rows.values, nullptr};
  }
  must(room(high, count * k * 2, "rows of a calibration"));
  must(room(low, count * k * 2, "rows of a calibration"));
  must(split_rows(
           {.rows = rows, .count = count, .k = k, .high = high.as<void>(), .low = low.as<void>()},
           stream),
       "splitting rows");
  return {high.as<void>(), low.as<void>()};
}

void CalibrationWork::add_products(const SplitRows& rows, int64_t count, int64_t k, float* h) {
  if (count == 0) {
    return;
  }
  const std::array<std::pair<const void*, const void*>, 3> products = {
      {{rows.high, rows.high}, {rows.high, rows.low}, {rows.low, rows.high}}};
  for (int64_t begin = 0; begin < k; begin += kSumColumns) {
    const int64_t end = std::min(k, begin + kSumColumns);
    const MatmulShape shape{.type = MatmulShape::Type::kBf16,
                            .transpose_b = true,
                            .m = end,
                            .n = end - begin,
                            .k = count,
                            .lda = k,
                            .ldb = k,
                            .ldc = k};
    for (const auto& [first, second] : products) {
      if (first != nullptr && second != nullptr) {
        multiply(shape, {.a = first,
                         .b = static_cast<const std::byte*>(second) + 2 * begin,
                         .c = h + begin * k,
                         .beta = 1.0F});
      }
    }
  }
}

void CalibrationWork::multiply(const MatmulShape& shape, const MatmulOperands& operands) {
  must(matmul->run(shape, operands));
}

}  // namespace nibble::cuda
