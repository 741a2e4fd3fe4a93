#include "backend/backend.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "core/buffer.h"

namespace nibble {

void Step::input_rows(const InputRows& /*args*/, float* /*out*/) {
  CHECK_MSG(false, "the rows of this device's products are not shown");
}

void Step::append_latent(const LatentAppendArgs& /*args*/) {
  CHECK_MSG(false, "latent attention is not computed on this device");
}

void Step::rotate_latent_queries(const LatentQueryArgs& /*args*/) {
  CHECK_MSG(false, "latent attention is not computed on this device");
}

std::vector<RowRange> Step::absorbed_rows(const ExpandedLatentArgs& /*args*/) {
  return {{.first = 0, .count = rows()}};
}

void Step::attend_expanded(const ExpandedLatentArgs& /*args*/) {}

Status check_update(const GemmProblem& prepared, int64_t first_row, const QuantView& rows) {
  if (!(rows.format == prepared.weight) || rows.k != prepared.k) {
    return make_error(StatusCode::kInvalidArgument,
                      "new weights [{}, {}] differ in format or columns from the [{}, {}] in use; "
                      "quantize them with the model's scheme",
                      rows.n, rows.k, prepared.n, prepared.k);
  }
  if (first_row < 0 || rows.n < 1 || first_row > prepared.n - rows.n) {
    return make_error(StatusCode::kInvalidArgument,
                      "new weights are rows {} to {} of a matrix of {} rows; give rows that it has",
                      first_row, first_row + rows.n, prepared.n);
  }
  return {};
}

// The defaults are those of backends whose memory is the host's.

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

Result<std::unique_ptr<PreparedHeads>> Backend::prepare_heads(std::span<const QuantView> heads,
                                                              const ActSpec& act,
                                                              int64_t max_m) {
  std::vector<std::unique_ptr<PreparedGemm>> prepared;
  for (const QuantView& head : heads) {
    NIBBLE_ASSIGN_OR_RETURN(auto gemm, prepare_gemm({&head, 1}, act, max_m));
    prepared.push_back(std::move(gemm));
  }
  return std::unique_ptr<PreparedHeads>(std::make_unique<HeadByHead>(std::move(prepared)));
}

Result<std::unique_ptr<PreparedExperts>> Backend::prepare_experts(
    const ExpertsRequest& /*request*/) {
  return make_error(StatusCode::kUnsupported,
                    "{} has no kernels for mixtures of experts; run the model with --device cpu",
                    name());
}

Result<std::unique_ptr<CalibrationMath>> Backend::calibration_math() {
  return make_error(StatusCode::kUnsupported, "{} calibrates in the host's memory", name());
}

void Backend::finish_step(std::span<SampledRow> /*out*/) {
  CHECK_MSG(false, "{} samples no tokens", name());
}

void Backend::read(const float* from, std::span<float> to) {
  std::copy_n(from, to.size(), to.data());
}

}  // namespace nibble
