#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/cuda/int_blocks.h"
#include "core/device_buffer.h"
#include "quant/act_spec.h"

namespace nibble::cuda {

/// What a product's rows in blocks of two precisions need of GPU memory.
class DeviceBlocks final {
 public:
  /// Of a spec in blocks; null for other formats. The errors of check_blocks(), and
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

/// The order of K for products of kBf16Blocks: the blocks in INT8, then those in BF16, as they
/// follow each other, each part filled up as WideRows says.
struct WideOrder {
  std::vector<int32_t> places;  // WideRows::places
  std::vector<int32_t> runs;    // which 32 of K every 32 channels of this order are; -1: none
  int int8_channels = 0;
  int int8_blocks = 0, bf16_blocks = 0;

  [[nodiscard]] WideRows rows(const int32_t* device_places) const {
    return {int8_channels, int8_blocks, bf16_blocks, device_places};
  }
};
[[nodiscard]] WideOrder wide_order(const BlockPrecision& blocks);

}  // namespace nibble::cuda
