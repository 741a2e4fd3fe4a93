#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "calibration/layer_rounder.h"
#include "core/device_buffer.h"

namespace nibble {

/// What the experts of a layer would read if nothing had been rounded, window after window, in the
/// memory that the layer computes in.
class FloatInputs final {
 public:
  explicit FloatInputs(const LayerParts& parts) : parts_(parts) {}

  /// Makes room; before normalize(). kResourceExhausted.
  Status reserve();
  /// Pass::before: takes what was kept of a window. kResourceExhausted, kIo.
  Status read(Kept what, int64_t window);
  /// As it was kept; valid until the next.
  [[nodiscard]] const float* rows() const { return rows_.as<float>(); }
  /// Of hidden states that were read what experts read, in the form in which the layer has it;
  /// valid until the next.
  ConstActivations normalize(const ForwardContext& context);

 private:
  const LayerParts& parts_;
  DeviceBuffer rows_;
  DeviceBuffer normed_;            // [rows, hidden]
  std::vector<std::byte> staged_;  // on their way to a device
};

}  // namespace nibble
