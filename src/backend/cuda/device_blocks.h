#pragma once

#include <memory>
#include <span>

#include "backend/cuda/int_blocks.h"
#include "core/device_buffer.h"
#include "quant/act_spec.h"

namespace nibble::cuda {

/// What a product's rows in blocks of 4 and 8 bits need of GPU memory.
class DeviceBlocks final {
 public:
  /// Of a spec of kIntBlocks; null for other formats. The errors of check_blocks(), and
  /// kInvalidArgument where columns are no permutation of k.
  static Result<std::shared_ptr<const DeviceBlocks>> create(const ActSpec& spec,
                                                            const WeightFormat& weight,
                                                            int64_t k);

  [[nodiscard]] const IntBlocks& view() const { return view_; }
  /// Whether rows become the same codes, scales and places.
  [[nodiscard]] bool same_rows(const DeviceBlocks& other) const {
    return spec_ == other.spec_ && view_.scales == other.view_.scales;
  }

 private:
  DeviceBlocks() = default;

  ActSpec spec_;
  DeviceBuffer memory_;
  IntBlocks view_;
};

/// The same of the rows that experts of a layer read, in one piece of memory.
class DeviceExpertBlocks final {
 public:
  /// Of one spec for all experts or one for each; null for other formats than kIntBlocks. The
  /// errors of DeviceBlocks::create().
  static Result<std::shared_ptr<const DeviceExpertBlocks>> create(std::span<const ActSpec> specs,
                                                                  const WeightFormat& weight,
                                                                  int64_t k);

  /// Specs that are all the same are one.
  [[nodiscard]] const ExpertBlocks& view() const { return view_; }

 private:
  DeviceExpertBlocks() = default;

  DeviceBuffer memory_;
  ExpertBlocks view_;
};

}  // namespace nibble::cuda
