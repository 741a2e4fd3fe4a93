#include "backend/cuda/device_blocks.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "backend/cuda/memory.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

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
  [[nodiscard]] size_t size() const { return bytes_.size(); }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// What a spec has in GPU memory, whose beginning is not known yet.
struct PlacedBlocks {
  IntBlocks known;
  size_t bits = 0, masks = 0, places = 0;
  std::optional<size_t> columns;

  [[nodiscard]] IntBlocks at(const std::byte* memory) const {
    IntBlocks view = known;
    view.bits = reinterpret_cast<const uint8_t*>(memory + bits);
    view.masks = reinterpret_cast<const uint8_t*>(memory + masks);
    view.wide.places = reinterpret_cast<const int32_t*>(memory + places);
    view.columns = columns ? reinterpret_cast<const int32_t*>(memory + *columns) : nullptr;
    return view;
  }
};

/// The weights that rows meet.
struct Weights {
  const WeightFormat& format;
  int64_t k = 0;
};

/// IntBlocks::masks; what fills K up counts as 4 bits.
std::vector<uint8_t> masks_of(const BlockPrecision& blocks) {
  std::vector<uint8_t> masks(static_cast<size_t>(int_k_blocks(blocks.k())));
  for (int64_t i = 0; i < blocks.k() / 32; ++i) {
    if (blocks.bits[static_cast<size_t>(i * 32 / blocks.block)] == 8) {
      masks[static_cast<size_t>(i / 4)] |= static_cast<uint8_t>(1 << (i % 4));
    }
  }
  return masks;
}

/// The bits of all channels beside the launch's arguments, if there is room for them.
void set_bits(const std::vector<uint8_t>& masks, IntBlocks& blocks) {
  blocks.here = std::ssize(masks) * 128 <= kChannelsHere;
  for (size_t i = 0; blocks.here && i < masks.size(); ++i) {
    blocks.eight[i / 8] |= static_cast<uint32_t>(masks[i]) << (4 * (i % 8));
  }
}

Result<PlacedBlocks> place(const ActSpec& spec, const Weights& weights, Arrays& arrays) {
  if (spec.blocks == nullptr) {
    return make_error(StatusCode::kInvalidArgument,
                      "activations in blocks of two precisions without the bits of their blocks");
  }
  const BlockPrecision& blocks = *spec.blocks;
  NIBBLE_RETURN_IF_ERROR(check_blocks(blocks, spec.format, weights.format, weights.k));
  PlacedBlocks placed;
  placed.known = {.block = blocks.block,
                  .scales = block_scales_of(weights.format, spec.format),
                  .clip = blocks.clip};
  placed.bits = arrays.add(std::span<const uint8_t>(blocks.bits));
  if (placed.known.scales == BlockScales::kWide) {
    const WideOrder order = wide_order(blocks);
    placed.known.wide = order.rows(nullptr);
    placed.places = arrays.add(std::span<const int32_t>(order.places));
  } else {
    const std::vector<uint8_t> masks = masks_of(blocks);
    set_bits(masks, placed.known);
    placed.masks = arrays.add(std::span<const uint8_t>(masks));
  }
  if (spec.columns != nullptr) {
    NIBBLE_RETURN_IF_ERROR(check_columns(*spec.columns, weights.k));
    placed.columns = arrays.add(std::span<const int32_t>(*spec.columns));
  }
  return placed;
}

Result<DeviceBuffer> allocate_blocks(size_t bytes) {
  return allocate_device(bytes, "the precisions of channels");
}

Status copy_blocks(std::span<const std::byte> bytes, std::byte* to) {
  return copy_to_device(to, bytes.data(), bytes.size());
}

}  // namespace

WideOrder wide_order(const BlockPrecision& blocks) {
  constexpr int kRun = 32, kInt8Run = 4 * kRun, kBf16Run = 2 * kRun;  // channels of 128 bytes
  WideOrder order;
  const auto begin_part = [&](uint8_t bits, int channel_bytes, int first_byte) {
    int channels = 0;
    order.places.resize(blocks.bits.size());
    for (size_t b = 0; b < blocks.bits.size(); ++b) {
      if (blocks.bits[b] != bits) {
        continue;
      }
      order.places[b] = first_byte + channels * channel_bytes;
      channels += blocks.block;
      for (int i = 0; i < blocks.block / kRun; ++i) {
        order.runs.push_back(static_cast<int32_t>(b) * (blocks.block / kRun) + i);
      }
    }
    return channels;
  };
  const auto fill_up = [&](int channels, int of_block) {  // to an even number of K blocks
    const int k_blocks = round_up(channels, 2 * of_block) / of_block;
    order.runs.resize(
        order.runs.size() + static_cast<size_t>((k_blocks * of_block - channels) / kRun), -1);
    return k_blocks;
  };
  order.int8_channels = begin_part(8, 1, 0);
  order.int8_blocks = fill_up(order.int8_channels, kInt8Run);
  const int bf16_channels = begin_part(16, 2, order.int8_blocks * 128);
  order.bf16_blocks = fill_up(bf16_channels, kBf16Run);
  return order;
}

Result<std::shared_ptr<const DeviceBlocks>> DeviceBlocks::create(const ActSpec& spec,
                                                                 const WeightFormat& weight,
                                                                 int64_t k) {
  if (!in_blocks(spec.format)) {
    return std::shared_ptr<const DeviceBlocks>();
  }
  Arrays arrays;
  NIBBLE_ASSIGN_OR_RETURN(const PlacedBlocks placed, place(spec, {weight, k}, arrays));
  std::shared_ptr<DeviceBlocks> result(new DeviceBlocks);
  NIBBLE_ASSIGN_OR_RETURN(result->memory_, allocate_blocks(arrays.size()));
  auto* memory = result->memory_.as<std::byte>();
  NIBBLE_RETURN_IF_ERROR(copy_blocks(arrays.bytes(), memory));
  result->spec_ = spec;
  result->view_ = placed.at(memory);
  return std::shared_ptr<const DeviceBlocks>(std::move(result));
}

Result<std::shared_ptr<const DeviceExpertBlocks>> DeviceExpertBlocks::create(
    std::span<const ActSpec> specs, const WeightFormat& weight, int64_t k) {
  if (specs.front().format != ActFormat::kIntBlocks) {
    return std::shared_ptr<const DeviceExpertBlocks>();
  }
  const bool alike =
      std::ranges::all_of(specs, [&](const ActSpec& spec) { return spec == specs.front(); });
  specs = alike ? specs.first(1) : specs;
  Arrays arrays;
  std::vector<PlacedBlocks> placed;
  for (const ActSpec& spec : specs) {
    NIBBLE_ASSIGN_OR_RETURN(placed.emplace_back(), place(spec, {weight, k}, arrays));
  }
  // Behind them those of every expert, whose pointers are of the GPU.
  const size_t views_at = round_up(arrays.size(), alignof(IntBlocks));
  std::shared_ptr<DeviceExpertBlocks> result(new DeviceExpertBlocks);
  NIBBLE_ASSIGN_OR_RETURN(result->memory_,
                          allocate_blocks(views_at + specs.size() * sizeof(IntBlocks)));
  auto* memory = result->memory_.as<std::byte>();
  std::vector<IntBlocks> views;
  for (const PlacedBlocks& each : placed) {
    views.push_back(each.at(memory));
  }
  NIBBLE_RETURN_IF_ERROR(copy_blocks(arrays.bytes(), memory));
  NIBBLE_RETURN_IF_ERROR(copy_blocks(std::as_bytes(std::span(views)), memory + views_at));
  result->view_.all = views.front();
  if (!alike) {
    const auto has_columns = [](const IntBlocks& view) { return view.columns != nullptr; };
    const auto found = std::ranges::find_if(views, has_columns);
    result->view_.all.columns = found == views.end() ? nullptr : found->columns;
    result->view_.each = reinterpret_cast<const IntBlocks*>(memory + views_at);
  }
  return std::shared_ptr<const DeviceExpertBlocks>(std::move(result));
}

}  // namespace nibble::cuda
