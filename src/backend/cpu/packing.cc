#include "backend/cpu/packing.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "backend/cpu/scale_type.h"
#include "backend/cpu/transpose.h"
#include "backend/cpu/valid_rows.h"
#include "base/check.h"
#include "quant/code_traits.h"

namespace nibble::cpu {
namespace {

constexpr uint32_t kZeroNibbles = 0x88888888U;  // eight codes of value 0
constexpr float kFp8Factor = 256.0F;            // kernels read E4M3 bits as 2^-8 of the value

/// Of one code; 0: half a byte, packed by words.
int64_t code_bytes(WeightCode code) { return code_traits(code).bits / 8; }

bool four_bits(WeightCode code) { return code_traits(code).bits == 4; }

int64_t step_bytes(WeightCode code) {
  return four_bits(code) ? kTileRows * 4 : kTileRows * kStepColumns * code_bytes(code);
}

uint32_t gather(uint32_t x) {
  x = (x | (x >> 4)) & 0x00ff00ffU;
  return (x | (x >> 8)) & 0xffffU;
}

/// A packed word's columns in order.
uint32_t nibbles_in_order(uint32_t word, ActFormat act) {
  return is_integer(act) ? gather(word & 0x0f0f0f0fU) | gather(word >> 4 & 0x0f0f0f0fU) << 16
                         : canonical_word({.reordered = true}, word);
}

/// Nibbles of a row's word that lie past k, as a mask.
uint32_t padding_mask(int64_t columns) {
  return columns >= kStepColumns ? 0U : ~0U << (4 * columns);
}

/// Neighbours of k that lie side by side in a lane.
int64_t lane_columns(WeightCode code, ActFormat act) {
  return is_integer(act) ? 4 : (code == WeightCode::kBf16 ? 2 : 1);
}

/// Element (lane, column) of a step.
int64_t element_index(int64_t lane, int64_t column, int64_t together) {
  return (column / together * kTileRows + lane) * together + column % together;
}

/// `reordered`: see NibbleForm.
WordOrder word_order(WeightCode code, bool reordered, ActFormat act) {
  const bool to_integers = is_integer(act);
  if (four_bits(code)) {
    const WordOrder floats = reordered ? WordOrder::kWords : WordOrder::kEvenOdd;
    const WordOrder integers = reordered ? WordOrder::kEvenOdd : WordOrder::kNibbles;
    return to_integers ? integers : floats;
  }
  if (code_traits(code).bits == 8) {
    return to_integers ? WordOrder::kWords : WordOrder::kBytes;
  }
  // Of BF16 two neighbours of k share a lane.
  return code == WeightCode::kF16 ? WordOrder::kHalves : WordOrder::kWords;
}

// The compiler turns loops of this fixed length into vector code.
constexpr int64_t kBlock = 64;

int32_t sum_of(const uint8_t* codes, int64_t count) {
  int32_t sum = 0;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j) {
      sum += static_cast<int8_t>(codes[i + j]);
    }
  }
  for (; i < count; ++i) {
    sum += static_cast<int8_t>(codes[i]);
  }
  return sum;
}

const uint8_t* row_codes(const QuantView& part, int64_t row) {
  return reinterpret_cast<const uint8_t*>(part.code_row(row));
}

}  // namespace

Result<PackedMatrix> PackedMatrix::create(Parts parts,
                                          ActFormat act,
                                          BufferArena& arena,
                                          ThreadPool& pool) {
  PackedMatrix packed = sized(parts, act);
  NIBBLE_RETURN_IF_ERROR(packed.allocate(arena));
  NIBBLE_RETURN_IF_ERROR(packed.pack(parts, 0, packed.tiles(), pool));
  return packed;
}

Result<std::vector<PackedMatrix>> PackedMatrix::create_all(
    std::span<const std::vector<QuantView>> matrices,
    ActFormat act,
    BufferArena& arena,
    ThreadPool& pool) {
  constexpr int64_t kFewestOfThread = 4;  // that keep all threads busy until the last are done
  const auto count = std::ssize(matrices);
  std::vector<PackedMatrix> packed(matrices.size());
  if (count < kFewestOfThread * pool.threads()) {
    for (size_t i = 0; i < packed.size(); ++i) {
      NIBBLE_ASSIGN_OR_RETURN(packed[i], create(matrices[i], act, arena, pool));
    }
    return packed;
  }
  pool.parallel_for(count, [&](int64_t i, int) {
    packed[static_cast<size_t>(i)] = sized(matrices[static_cast<size_t>(i)], act);
  });
  for (PackedMatrix& matrix : packed) {
    NIBBLE_RETURN_IF_ERROR(matrix.allocate(arena));
  }
  std::atomic<int64_t> bad = count;  // the first one
  pool.parallel_for(count, [&](int64_t i, int) {
    PackedMatrix& matrix = packed[static_cast<size_t>(i)];
    bool valid = true;
    for (int64_t tile = 0; tile < matrix.tiles(); ++tile) {
      valid = matrix.pack_tile(matrices[static_cast<size_t>(i)], tile) && valid;
    }
    int64_t before = bad;
    while (!valid && i < before && !bad.compare_exchange_weak(before, i)) {
    }
  });
  if (bad < count) {
    const auto first = static_cast<size_t>(bad.load());
    return packed[first].invalid_rows(matrices[first]);
  }
  return packed;
}

PackedMatrix PackedMatrix::sized(Parts parts, ActFormat act) {
  CHECK(!parts.empty());
  const QuantView& first = parts.front();
  const WeightFormat& format = first.format;
  PackedMatrix packed;
  packed.format_ = format;
  packed.act_ = act;
  packed.k_ = first.k;
  packed.scale_factor_ = format.code == WeightCode::kFp8E4M3 ? kFp8Factor : 1.0F;
  packed.scale_type_ = wanted_type(format, packed.scale_factor_);
  for (const QuantView& part : parts) {
    CHECK(part.format == format);
    CHECK(part.nibbles == first.nibbles);
    CHECK_EQ(part.k, packed.k_);
    packed.n_ += part.n;
    packed.scale_type_ = !packed.has_levels() && scales_fit(part, packed.scale_type_)
                             ? packed.scale_type_
                             : ScaleType::kF32;
  }
  return packed;
}

Status PackedMatrix::allocate(BufferArena& arena) {
  const int64_t rows = tiles() * kTileRows;
  const int64_t code_size = tiles() * packed_steps() * step_bytes(format_.code);
  NIBBLE_ASSIGN_OR_RETURN(codes_, arena.allocate(static_cast<size_t>(code_size)));
  const int64_t scale_bytes = rows * packed_groups() * bytes_of(scale_type_);
  NIBBLE_ASSIGN_OR_RETURN(scales_, arena.allocate(static_cast<size_t>(scale_bytes)));
  if (has_levels()) {
    const int64_t level_bytes = tiles() * format_.groups(k_) * kLevelBytes;
    NIBBLE_ASSIGN_OR_RETURN(levels_, arena.allocate(static_cast<size_t>(level_bytes)));
  } else if (format_.zero_points == ZeroPoints::kPerScale) {
    NIBBLE_ASSIGN_OR_RETURN(zeros_, arena.allocate(static_cast<size_t>(rows * format_.groups(k_))));
  } else if (format_.zero_points == ZeroPoints::kMinimum) {
    NIBBLE_ASSIGN_OR_RETURN(minimums_, arena.allocate(static_cast<size_t>(scale_bytes)));
  }
  if (act_ == ActFormat::kInt8Token && format_.code == WeightCode::kInt8) {
    NIBBLE_ASSIGN_OR_RETURN(row_sums_, arena.allocate(static_cast<size_t>(rows * 4)));
  }
  return {};
}

Status PackedMatrix::update(int64_t first_row, const QuantView& weight, ThreadPool& pool) {
  CHECK(weight.format == format_);
  CHECK_EQ(weight.k, k_);
  const int64_t end_row = first_row + weight.n;
  CHECK(first_row >= 0 && weight.n > 0 && end_row <= n_);
  if (!scales_fit(weight, scale_type_)) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: scales are not representable in {}, in which this matrix keeps them; "
                      "round them first",
                      weight.name, dtype_name(dtype_of(scale_type_)));
  }
  for (int64_t row = 0; row < weight.n; ++row) {
    if (!is_valid_row(weight, row, act_)) {
      return invalid_row(weight, act_);
    }
  }
  // Tiles at the ends keep the rows that are not replaced.
  const int64_t first_tile = first_row / kTileRows;
  const int64_t end_tile = (end_row + kTileRows - 1) / kTileRows;
  const int64_t begin = first_tile * kTileRows;
  const int64_t end = std::min(n_, end_tile * kTileRows);
  QuantView skipped = weight;  // the rows above, of tiles that are not packed: nobody reads them
  skipped.n = begin;
  std::vector<QuantView> parts = {skipped};
  QuantTensor above;
  if (begin < first_row) {
    NIBBLE_ASSIGN_OR_RETURN(above, unpack_rows(begin, first_row));
    parts.push_back(view_of(above));
  }
  parts.push_back(weight);
  QuantTensor below;
  if (end_row < end) {
    NIBBLE_ASSIGN_OR_RETURN(below, unpack_rows(end_row, end));
    parts.push_back(view_of(below));
  }
  return pack(parts, first_tile, end_tile, pool);
}

Status PackedMatrix::pack(Parts parts, int64_t first, int64_t end, ThreadPool& pool) {
  std::atomic<int64_t> bad_tile = -1;
  pool.parallel_for(end - first, [&](int64_t i, int) {
    if (!pack_tile(parts, first + i)) {
      bad_tile = first + i;
    }
  });
  return bad_tile < 0 ? Status() : invalid_rows(parts);
}

Status PackedMatrix::invalid_rows(Parts parts) const {
  for (const QuantView& part : parts) {
    for (int64_t row = 0; row < part.n; ++row) {
      if (!is_valid_row(part, row, act_)) {
        return invalid_row(part, act_);
      }
    }
  }
  return invalid_row(parts.front(), act_);
}

int64_t PackedMatrix::packed_steps() const {
  const int64_t unit = is_integer(act_) ? 8 : 4;
  return (steps() + unit - 1) / unit * unit;
}

bool PackedMatrix::pack_tile(Parts parts, int64_t tile) {
  std::array<RowSource, kTileRows> rows;
  RowsToTranspose source;
  source.bytes = parts.front().row_bytes();
  const NibbleForm nibbles = parts.front().nibbles;
  if (four_bits(format_.code)) {
    source.flip = nibbles.flip();
    source.fill = (format_.code == WeightCode::kInt4 ? kZeroNibbles : 0U) ^ source.flip;
    source.last_word = ~padding_mask(k_ - (steps() - 1) * kStepColumns);
  }
  bool valid = true;
  size_t part = 0;
  int64_t begin = 0;  // row at which the part begins
  for (int64_t lane = 0; lane < kTileRows && tile * kTileRows + lane < n_; ++lane) {
    const int64_t row = tile * kTileRows + lane;
    while (row - begin >= parts[part].n) {
      begin += parts[part++].n;
    }
    const auto i = static_cast<size_t>(lane);
    rows[i] = {&parts[part], row - begin};
    source.rows[i] = row_codes(parts[part], row - begin);
    valid = valid && is_valid_row(parts[part], row - begin, act_);
  }
  const int64_t tile_bytes = packed_steps() * step_bytes(format_.code);
  transpose_rows(source, tile_bytes / (kTileRows * 4),
                 word_order(format_.code, nibbles.reordered, act_),
                 reinterpret_cast<uint8_t*>(codes_.data()) + tile * tile_bytes);
  if (row_sums_.size() != 0) {
    for (size_t lane = 0; lane < rows.size(); ++lane) {
      row_sums_.as<int32_t>()[static_cast<size_t>(tile * kTileRows) + lane] =
          source.rows[lane] != nullptr ? sum_of(source.rows[lane], k_) : 0;
    }
  }
  if (has_levels() && valid) {
    pack_levels(rows, tile);
  }
  if (has_levels()) {
    return valid;
  }
  if (scales_.size() != 0) {
    pack_numbers(GroupNumbers::kScales, rows, tile);
  }
  if (minimums_.size() != 0) {
    pack_numbers(GroupNumbers::kMinimums, rows, tile);
  }
  if (zeros_.size() != 0) {
    pack_zeros(rows, tile);
  }
  return valid;
}

void PackedMatrix::pack_numbers(GroupNumbers which, std::span<const RowSource> rows, int64_t tile) {
  const int64_t groups = format_.groups(k_);
  const int64_t size = bytes_of(scale_type_);
  const bool scales = which == GroupNumbers::kScales;
  std::byte* out = (scales ? scales_ : minimums_).data() + tile * groups * kTileRows * size;
  RowsToTranspose source;
  source.bytes = groups * size;
  bool as_stored = scale_factor_ == 1.0F && source.bytes % 4 == 0;
  for (size_t lane = 0; lane < rows.size(); ++lane) {
    const auto [part, row] = rows[lane];
    if (part != nullptr) {
      as_stored = as_stored && part->scale_type == dtype_of(scale_type_) &&
                  part->scale_count == QuantView::Scales::kEach;
      const std::byte* stored = scales ? part->scales : part->minimums;
      source.rows[lane] = reinterpret_cast<const uint8_t*>(stored) + row * source.bytes;
    }
  }
  if (as_stored) {
    transpose_rows(source, source.bytes / 4, size == 2 ? WordOrder::kHalves : WordOrder::kWords,
                   reinterpret_cast<uint8_t*>(out));
    return;
  }
  for (int64_t i = 0; i < groups * kTileRows; ++i) {
    const auto [part, row] = rows[static_cast<size_t>(i % kTileRows)];
    const int64_t index = row * groups + i / kTileRows;
    float number = 0.0F;
    if (part != nullptr) {
      number = scales ? part->scale(index) * scale_factor_ : part->minimum(index);
    }
    store_number(scale_type_, number, out + i * size);
  }
}

void PackedMatrix::pack_zeros(std::span<const RowSource> rows, int64_t tile) {
  const int64_t groups = format_.groups(k_);
  int8_t* out = zeros_.as<int8_t>().data() + tile * groups * kTileRows;
  for (int64_t i = 0; i < groups * kTileRows; ++i) {
    const auto [part, row] = rows[static_cast<size_t>(i % kTileRows)];
    out[i] = part == nullptr ? int8_t{0} : part->zeros[row * groups + i / kTileRows];
  }
}

float PackedMatrix::unpacked(GroupNumbers which, int64_t index) const {
  const bool scales = which == GroupNumbers::kScales;
  const float number = load_number(
      scale_type_, (scales ? scales_ : minimums_).data() + index * bytes_of(scale_type_));
  return scales ? number / scale_factor_ : number;
}

Result<QuantTensor> PackedMatrix::unpack() const {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, QuantTensor::allocate(format_, n_, k_));
  for (int64_t tile = 0; tile < tiles(); ++tile) {
    unpack_tile(weight, tile, 0);
  }
  return weight;
}

Result<QuantTensor> PackedMatrix::unpack_rows(int64_t first, int64_t end) const {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, QuantTensor::allocate(format_, end - first, k_));
  unpack_tile(weight, first / kTileRows, first);
  return weight;
}

void PackedMatrix::unpack_tile(QuantTensor& weight, int64_t tile, int64_t first) const {
  const int64_t tile_bytes = packed_steps() * step_bytes(format_.code);
  const auto* source = reinterpret_cast<const uint8_t*>(codes_.data()) + tile * tile_bytes;
  const int64_t together = lane_columns(format_.code, act_);
  const int64_t size = code_bytes(format_.code);
  const int64_t groups = format_.groups(k_);
  for (int64_t lane = 0; lane < kTileRows; ++lane) {
    const int64_t row = tile * kTileRows + lane - first;
    if (row < 0 || row >= weight.n) {
      continue;
    }
    auto* codes = reinterpret_cast<uint8_t*>(weight.codes.data()) + row * weight.row_bytes();
    for (int64_t step = 0; step < steps(); ++step) {
      const uint8_t* from = source + step * step_bytes(format_.code);
      if (four_bits(format_.code)) {
        uint32_t word = 0;
        std::memcpy(&word, from + lane * 4, 4);
        word = nibbles_in_order(word, act_) & ~padding_mask(k_ - step * kStepColumns);
        std::memcpy(codes + step * 4, &word, 4);
        continue;
      }
      for (int64_t c = 0; c < kStepColumns && step * kStepColumns + c < k_; ++c) {
        std::memcpy(codes + (step * kStepColumns + c) * size,
                    from + element_index(lane, c, together) * size, static_cast<size_t>(size));
      }
    }
    if (has_levels()) {
      unpack_levels(weight, row, tile * kTileRows + lane);
      continue;
    }
    for (int64_t g = 0; g < groups; ++g) {
      const auto to = static_cast<size_t>(row * groups + g);
      const int64_t from = (tile * groups + g) * kTileRows + lane;
      weight.scales.as<float>()[to] = unpacked(GroupNumbers::kScales, from);
      if (zeros_.size() != 0) {
        weight.zeros.as<int8_t>()[to] = zeros_.as<int8_t>()[static_cast<size_t>(from)];
      }
      if (minimums_.size() != 0) {
        weight.minimums.as<float>()[to] = unpacked(GroupNumbers::kMinimums, from);
      }
    }
  }
}

PackedWeights PackedMatrix::view() const {
  PackedWeights view;
  view.codes = reinterpret_cast<const uint8_t*>(codes_.data());
  view.tile_bytes = packed_steps() * step_bytes(format_.code);
  view.scales = scales_.data();
  view.scale_type = scale_type_;
  view.n = n_;
  view.k = k_;
  view.groups = packed_groups();
  view.group_size = format_.grouped() && !has_levels() ? format_.group_size : k_;
  view.levels = reinterpret_cast<const uint8_t*>(levels_.data());
  view.level_columns = has_levels() ? format_.group_size : 0;
  view.block = view.group_size < kMaxBlock && view.group_size < k_ ? view.group_size : kMaxBlock;
  view.zeros = reinterpret_cast<const uint8_t*>(zeros_.data());
  view.minimums = minimums_.data();
  view.row_sums = reinterpret_cast<const int32_t*>(row_sums_.data());
  return view;
}

int64_t PackedMatrix::bytes() const {
  return static_cast<int64_t>(codes_.size() + scales_.size() + zeros_.size() + minimums_.size() +
                              levels_.size() + row_sums_.size());
}

}  // namespace nibble::cpu
