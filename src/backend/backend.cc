#include "backend/backend.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "core/buffer.h"

namespace nibble {

// The defaults are those of backends whose memory is the host's.

Result<double> Backend::measure_read_gbps() {
  return make_error(StatusCode::kUnsupported, "{} does not measure its memory", name());
}

Result<Json> Backend::bench_kernels(const KernelBenchOptions& /*options*/) {
  return make_error(StatusCode::kUnsupported, "{} has no benchmark of its kernels", name());
}

Result<DeviceBuffer> Backend::allocate(size_t bytes) {
  NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(bytes));
  const auto owner = std::make_shared<Buffer>(std::move(buffer));
  return DeviceBuffer(owner->data(), bytes, [owner](void*) {});
}

Result<DeviceBuffer> Backend::upload(std::span<const float> values) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer buffer, allocate(values.size_bytes()));
  std::ranges::copy(values, buffer.as<float>());
  return buffer;
}

void Backend::start_picks(const PickInput& /*input*/) {
  CHECK_MSG(false, "{} picks no tokens", name());
}

void Backend::pick_tokens(float* /*logits*/, int64_t /*vocab*/) {
  CHECK_MSG(false, "{} picks no tokens", name());
}

void Backend::finish_picks(std::span<PickedRow> /*out*/) {
  CHECK_MSG(false, "{} picks no tokens", name());
}

void Backend::read(const float* from, std::span<float> to) {
  std::copy_n(from, to.size(), to.data());
}

Status Backend::check_kv(const KvView& shape, int64_t /*heads*/) const {
  static constexpr KvCode kCodes[] = {KvCode::kF32, KvCode::kBf16, KvCode::kInt8, KvCode::kInt4};
  if (std::ranges::find(kCodes, shape.code) != std::end(kCodes)) {
    return {};
  }
  return make_error(StatusCode::kUnsupported,
                    "{} has no {} cache, but {}; choose one of these by --kv-cache-dtype, or "
                    "--device cuda",
                    name(), kv_code_name(shape.code), kv_code_names(kCodes));
}

Status Backend::prepare_steps(const StepLimits& /*limits*/) { return {}; }

void Backend::run_step(const StepInput& input,
                       int64_t /*program*/,
                       const std::function<void(const StepShape&)>& layers) {
  layers({.rows = std::ssize(input.tokens), .logit_rows = std::ssize(input.logit_rows)});
}

void Backend::pick_rows(
    const StepInput& input, const StepShape& shape, const float* from, int64_t width, float* to) {
  for (int64_t i = 0; i < shape.logit_rows; ++i) {
    const int32_t row = input.logit_rows[static_cast<size_t>(i)];
    CHECK_MSG(row >= 0 && row < shape.rows, "logit row {} of {}", row, shape.rows);
    std::copy_n(from + row * width, width, to + i * width);
  }
}

}  // namespace nibble
