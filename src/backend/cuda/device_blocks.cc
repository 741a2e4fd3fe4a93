#include "backend/cuda/device_blocks.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "backend/cuda/memory.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int kAllOf8Bits = 15;  // of the bits of four times 32 channels

Status check_columns(const std::vector<int32_t>& columns, int64_t k) {
  std::vector<bool> there(static_cast<size_t>(k));
  for (const int32_t column : columns) {
    if (column < 0 || column >= k || there[static_cast<size_t>(column)]) {
      return make_error(StatusCode::kInvalidArgument,
                        "the order of channels is no permutation of {}: {} is out of range or "
                        "occurs twice",
                        k, column);
    }
    there[static_cast<size_t>(column)] = true;
  }
  return std::ssize(columns) == k
             ? Status()
             : make_error(StatusCode::kInvalidArgument, "the order of channels has {} of {}",
                          columns.size(), k);
}

/// Arrays one behind the other in a buffer of the GPU.
class Arrays final {
 public:
  template <typename T>
  size_t add(std::span<const T> values) {
    const size_t at = round_up(bytes_.size(), size_t{16});
    bytes_.resize(at + values.size_bytes());
    std::ranges::copy(std::as_bytes(values), bytes_.begin() + static_cast<ptrdiff_t>(at));
    return at;
  }
  [[nodiscard]] Result<DeviceBuffer> to_device() const {
    NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer buffer,
                            allocate_device(bytes_.size(), "the precisions of channels"));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(buffer.as<std::byte>(), bytes_.data(), bytes_.size()));
    return buffer;
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

ClassOrder class_order(const BlockPrecision& blocks) {
  const auto count = static_cast<size_t>(int_k_blocks(blocks.k()));
  ClassOrder result;
  std::vector<uint8_t>& masks = result.masks;
  masks.resize(count);
  for (int64_t i = 0; i < blocks.k() / 32; ++i) {
    if (blocks.bits[static_cast<size_t>(i * 32 / blocks.block)] == 8) {
      masks[static_cast<size_t>(i / 4)] |= static_cast<uint8_t>(1 << (i % 4));
    }
  }
  result.order.resize(count);
  std::iota(result.order.begin(), result.order.end(), uint16_t{0});
  const auto rank = [&](uint16_t block) {
    return masks[block] == kAllOf8Bits ? 0 : masks[block] == 0 ? 2 : 1;
  };
  std::ranges::stable_sort(result.order, {}, rank);
  for (const uint16_t block : result.order) {
    result.precisions.push_back(masks[block]);
    result.eight_blocks += rank(block) == 0 ? 1 : 0;
    result.mixed_blocks += rank(block) <= 1 ? 1 : 0;
  }
  return result;
}

Result<std::shared_ptr<const DeviceBlocks>> DeviceBlocks::create(const ActSpec& spec,
                                                                 const WeightFormat& weight,
                                                                 int64_t k) {
  if (spec.format != ActFormat::kIntBlocks) {
    return std::shared_ptr<const DeviceBlocks>();
  }
  if (spec.blocks == nullptr) {
    return make_error(StatusCode::kInvalidArgument,
                      "activations in blocks of 4 and 8 bits without the bits of their blocks");
  }
  const BlockPrecision& blocks = *spec.blocks;
  NIBBLE_RETURN_IF_ERROR(check_blocks(blocks, spec.format, weight, k));
  const ClassOrder classes = class_order(blocks);
  Arrays arrays;
  const size_t bits = arrays.add(std::span<const uint8_t>(blocks.bits));
  const size_t order = arrays.add(std::span<const uint16_t>(classes.order));
  const size_t precisions = arrays.add(std::span<const uint8_t>(classes.precisions));
  const size_t masks = arrays.add(std::span<const uint8_t>(classes.masks));
  size_t columns = 0;
  if (spec.columns != nullptr) {
    NIBBLE_RETURN_IF_ERROR(check_columns(*spec.columns, k));
    columns = arrays.add(std::span<const int32_t>(*spec.columns));
  }
  std::shared_ptr<DeviceBlocks> result(new DeviceBlocks);
  NIBBLE_ASSIGN_OR_RETURN(result->memory_, arrays.to_device());
  const auto* memory = result->memory_.as<std::byte>();
  result->spec_ = spec;
  result->view_ = {.block = blocks.block,
                   .scales = block_scales_of(weight, spec.format),
                   .clip = blocks.clip,
                   .bits = reinterpret_cast<const uint8_t*>(memory + bits),
                   .columns = spec.columns != nullptr
                                  ? reinterpret_cast<const int32_t*>(memory + columns)
                                  : nullptr,
                   .order = reinterpret_cast<const uint16_t*>(memory + order),
                   .precisions = reinterpret_cast<const uint8_t*>(memory + precisions),
                   .masks = reinterpret_cast<const uint8_t*>(memory + masks),
                   .eight_blocks = classes.eight_blocks,
                   .mixed_blocks = classes.mixed_blocks};
  return std::shared_ptr<const DeviceBlocks>(std::move(result));
}

}  // namespace nibble::cuda
