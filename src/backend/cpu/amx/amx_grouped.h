#pragma once

// Products with weights in groups, whose sums leave the tiles after every group to be scaled. The
// bits are those of gemm_kernels.h.

#include <utility>

#include "backend/cpu/amx/amx_gemm.h"

namespace nibble::cpu {
namespace {

/// What is multiplied, and how the sums of a group become part of a total: those of bf16, times the
/// scale of the weights.
struct FloatGroups {
  static constexpr bool kRowScales = false;
  static constexpr int64_t kColumns = 32;  // of a tile product
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] static void product() {
    dot_bf16<kC, kA, kB>();
  }
  [[gnu::always_inline]] static F32x16 add(const uint8_t* sums,
                                           F32x16 scale,
                                           const float* /*row_scale*/,
                                           F32x16 total) {
    return Simd::fma(Simd::load(reinterpret_cast<const float*>(sums)), scale, total);
  }
};

/// total += scale * (sum of a group), the first kRows rows.
///   row_scales  those of the rows in this group, where the kind has them
template <typename Kind, int kRows>
[[gnu::always_inline]] inline void add_group(const uint8_t* sums,
                                             F32x16 scale,
                                             const float* row_scales,
                                             F32x16 (&total)[kRows]) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < kRows; ++r) {
    total[r] = Kind::add(sums + r * 64, scale, row_scales + r, total[r]);
  }
}

/// Where the sums of kRows tiles of rows and kCols weight tiles go.
struct GroupTotals {
  float* kept;          // [kRows][2][16][16]
  const float* scales;  // [kCols][groups of a slab][16]
  bool start;           // from zero
  // Of the rows, where a kind has them: [groups][16] of a tile of rows, row_stride from the next.
  const float* row_scales;
  int64_t row_stride;
};

/// A slab of activations and as much of some weight tiles.
struct GroupedSlab {
  const uint8_t* x;  // [row tile][kSlabPieces] tiles
  uint8_t* panel;    // [weight tile][kSlabPieces] tiles
  const uint8_t*
      next[kStepTiles];  // weights to expand in their place during the last rows, or null
  GroupTotals totals;    // of the first tiles of rows
};

/// Products of kRows tiles of rows and kCols weight tiles, 1 or 2 each, which share what they load.
/// Sums pass through memory to the vector unit, so they are a pipeline that goes on from rows to
/// rows and from slab to slab: in every slot a group is multiplied, the sums of an earlier one are
/// stored, and those of a still earlier one are scaled and added. All pairs of tiles take turns in
/// the products; totals have registers for one pair only, so kRun groups of it are added in a row.
template <typename Panel, typename Kind, int kProducts, int kRows, int kCols>
class GroupPipeline {
 public:
  static constexpr int kPairs = kRows * kCols;
  static constexpr int kGroups = kSlabPieces / kProducts;
  static constexpr int kSlots = kGroups * kPairs;
  static constexpr int kRun = kRows == 2 ? kGroups / 2 : kGroups;
  static constexpr int kStoreLag = kSlots > 4 ? 3 : kSlots / 2;
  static constexpr int kReady = (kPairs - 1) * (kRun - 1) + kStoreLag + 2;  // when a run is stored
  static constexpr int kAddLag = kReady < kSlots ? kReady : kSlots;
  /// Four pairs of a group of two products: all take the first, then all the second, two pairs in a
  /// slot, so that none waits for itself.
  static constexpr bool kTogether = kPairs == 4 && kProducts == 2;
  static_assert(kRows == 1 || kProducts == 1 || kTogether);

  /// `unused`: memory for the totals of what is in the ring at first.
  GroupPipeline(uint8_t* ring, float* unused) : ring_(ring), unused_(unused), last_{nothing()} {}

  /// totals += sums of tiles of rows begin .. end-1; the last ones are added later.
  [[gnu::noinline]] void run(const GroupedSlab& slab, int64_t begin, int64_t end, Ahead& ahead) {
    GroupTotals last = last_;
    F32x16 total[16];
    copy(total_, total);
    for (int64_t i = begin; i < end; i += kRows) {
      GroupTotals totals = slab.totals;
      totals.kept += i * 2 * kTileBytes / 4;
      totals.row_scales += i * totals.row_stride;
      const SlotTask task{slab.x + i * kSlabPieces * kTileBytes, slab.panel, slab.next, ring_};
      constexpr auto kAll = std::make_integer_sequence<int, kSlots>();
      if (slab.next[0] != nullptr && i + kRows >= end) {
        slots<true>(kAll, task, last, totals, total, ahead);
      } else {
        slots<false>(kAll, task, last, totals, total, ahead);
      }
      last = totals;
    }
    last_ = last;
    copy(total, total_);
  }

  /// Adds what is left.
  [[gnu::noinline]] void drain() {
    if (last_.kept != unused_) {
      F32x16 total[16];
      copy(total_, total);
      drain_slots(std::make_integer_sequence<int, kAddLag>(), ring_, last_, total);
      last_ = nothing();
    }
  }

  /// Products in the order of slots, sums in that of their addition.
  static constexpr int product_of(int pair, int group) { return group * kPairs + pair; }
  static constexpr int pair_of(int added) { return added / kRun % kPairs; }
  static constexpr int group_of(int added) { return added / (kRun * kPairs) * kRun + added % kRun; }

  /// Where in the ring the sums of each product are: no two that wait at the same time have one
  /// place.
  struct Places {
    int at[kSlots] = {};
    int count = 0;
    bool valid = true;  // no sums wait until the next of the same product
  };
  static constexpr Places places() {
    Places places;
    int end[kSlots] = {};  // when its sums are added
    for (int i = 0; i < kSlots; ++i) {
      end[product_of(pair_of(i), group_of(i))] = i + kAddLag;
    }
    const auto meet = [&](int i, int j) {
      constexpr int kLag = kTogether ? kStoreLag - 1 : kStoreLag;  // the earliest
      bool both = false;
      for (int turn = -2 * kSlots; turn <= 2 * kSlots; turn += kSlots) {
        both = both || (i + kLag < end[j] + turn && j + kLag + turn < end[i]);
      }
      return both;
    };
    for (int i = 0; i < kSlots; ++i) {
      places.valid = places.valid && end[i] - i - kStoreLag <= kSlots;
      for (int j = 0; j < i; ++j) {
        if (places.at[j] == places.at[i] && meet(i, j)) {
          ++places.at[i];
          j = -1;
        }
      }
      places.count = places.count > places.at[i] ? places.count : places.at[i] + 1;
    }
    return places;
  }

 private:
  [[nodiscard]] GroupTotals nothing() const { return {unused_, unused_, true, unused_, 0}; }

  static constexpr Places kPlaces = places();
  static_assert(kPlaces.valid);

  /// Where a run's slots find their operands.
  struct SlotTask {
    const uint8_t* x;
    uint8_t* panel;
    const uint8_t* const* next;
    uint8_t* ring;
  };

  [[gnu::always_inline]] static void copy(const F32x16 (&from)[16], F32x16 (&to)[16]) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      to[r] = from[r];
    }
  }

  template <int kSlot, int kLag>
  [[gnu::always_inline]] static void store_lagging(uint8_t* ring) {
    constexpr int kStored = (kSlot - kLag + kSlots) % kSlots;
    store_tile<kStored % 4, kPlaces.at[kStored] * kTileBytes>(ring);
  }

  /// Together the last pair's sums leave with those before it: their tile begins anew in that slot.
  template <int kSlot>
  [[gnu::always_inline]] static void store(uint8_t* ring) {
    constexpr int kBegins = kSlot % 4;
    if constexpr (!kTogether || kBegins != 2) {
      store_lagging<kSlot, kStoreLag>(ring);
    }
    if constexpr (kTogether && kBegins == 1) {
      store_lagging<kSlot, kStoreLag - 1>(ring);
    }
  }

  /// Adds a product to sums; rows and weights that the pairs before have loaded are there. With
  /// kExpand a share of the next weights takes the place of these.
  template <bool kExpand, int kSum, int kPair, int kPiece>
  [[gnu::always_inline]] static void multiply_piece(const SlotTask& task) {
    constexpr int kRow = kPair / kCols;
    constexpr int kCol = kPair % kCols;
    constexpr int kRowTile = 4 + (kRows == 2 ? kRow : kPiece % 2);
    constexpr int kWeightTile = 6 + (kCols == 2 ? kCol : kPiece % 2);
    if constexpr (kCol == 0) {
      stream_tile<kRowTile, (kRow * kSlabPieces + kPiece) * kTileBytes>(task.x);
    }
    constexpr int64_t kAt = (kCol * kSlabPieces + kPiece) * kTileBytes;
    if constexpr (kRow == 0) {
      load_tile<kWeightTile, kAt>(task.panel);
    }
    Kind::template product<kSum, kRowTile, kWeightTile>();
    if constexpr (kExpand) {
      constexpr int kShare = Panel::kParts / kRows;
      expand_tile<Panel, kRow * kShare, (kRow + 1) * kShare>(
          task.next[kCol] + kPiece * Panel::kSourceBytes, task.panel + kAt);
    }
  }

  template <bool kExpand, int kSum, int kFirst, int... kI>
  [[gnu::always_inline]] static void multiply_pieces(std::integer_sequence<int, kI...> /*pieces*/,
                                                     const SlotTask& task) {
    if constexpr (kPairs == 1) {
      (multiply_piece<kExpand, kSum, 0, kFirst + kI>(task), ...);
    } else {
      ((multiply_piece<kExpand, kSum, 0, kFirst + kI>(task),
        multiply_piece<kExpand, kSum + 1, 1, kFirst + kI>(task)),
       ...);
    }
  }

  /// The slot's group. Groups of more products take turns by product: half of them in each slot.
  template <bool kExpand, int kSlot>
  [[gnu::always_inline]] static void multiply(const SlotTask& task) {
    constexpr int kPiece = kSlot / kPairs * kProducts;
    constexpr int kPair = kSlot % kPairs;
    constexpr int kSum = kSlot % 4;
    if constexpr (kProducts == 1) {
      zero_tile<kSum>();
      multiply_piece<kExpand, kSum, kPair, kPiece>(task);
    } else if constexpr (kTogether) {
      constexpr int kFirst = kPair % 2 * 2;
      if constexpr (kPair < 2) {
        zero_tile<kFirst>();
        zero_tile<kFirst + 1>();
      }
      multiply_piece<kExpand, kFirst, kFirst, kPiece + kPair / 2>(task);
      multiply_piece<kExpand, kFirst + 1, kFirst + 1, kPiece + kPair / 2>(task);
    } else if constexpr (kPairs == 1) {
      zero_tile<kSum>();
      multiply_pieces<kExpand, kSum, kPiece>(std::make_integer_sequence<int, kProducts>(), task);
    } else {
      constexpr int kHalf = kProducts / 2;
      if constexpr (kPair == 0) {
        zero_tile<kSum>();
        zero_tile<kSum + 1>();
      }
      multiply_pieces<kExpand, kSum - kPair, kPiece + kPair * kHalf>(
          std::make_integer_sequence<int, kHalf>(), task);
    }
  }

  template <int kSlot>
  [[gnu::always_inline]] static void add(const uint8_t* ring,
                                         const GroupTotals& totals,
                                         F32x16 (&total)[16]) {
    constexpr int kAdded = (kSlot - kAddLag + kSlots) % kSlots;
    constexpr int kPair = pair_of(kAdded);
    constexpr int kGroup = group_of(kAdded);
    float* kept = totals.kept + (kPair / kCols * 2 + kPair % kCols) * kTileBytes / 4;
    if constexpr (kGroup % kRun == 0) {
      const bool start = kGroup == 0 && totals.start;
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        total[r] = start ? Simd::set(0.0F) : Simd::load(kept + r * 16);
      }
    }
    add_group<Kind>(ring + kPlaces.at[product_of(kPair, kGroup)] * kTileBytes,
                    Simd::load(totals.scales + (kPair % kCols * kGroups + kGroup) * 16),
                    totals.row_scales + kPair / kCols * totals.row_stride + kGroup * 16, total);
    if constexpr (kGroup % kRun == kRun - 1) {
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        Simd::store(kept + r * 16, total[r]);
      }
    }
  }

  template <bool kExpand, int... kSlot>
  [[gnu::always_inline]] static void slots(std::integer_sequence<int, kSlot...> /*slots*/,
                                           const SlotTask& task,
                                           const GroupTotals& last,
                                           const GroupTotals& now,
                                           F32x16 (&total)[16],
                                           Ahead& ahead) {
    ((kSlot % kPairs == 0 ? ahead.step() : void(),
      add<kSlot>(task.ring, kSlot < kAddLag ? last : now, total), store<kSlot>(task.ring),
      multiply<kExpand, kSlot>(task)),
     ...);
  }

  template <int... kSlot>
  [[gnu::always_inline]] static void drain_slots(std::integer_sequence<int, kSlot...> /*slots*/,
                                                 uint8_t* ring,
                                                 const GroupTotals& last,
                                                 F32x16 (&total)[16]) {
    ((add<kSlot>(ring, last, total), kSlot < kStoreLag ? store<kSlot>(ring) : void()), ...);
  }

  uint8_t* ring_;
  float* unused_;
  GroupTotals last_;
  F32x16 total_[16];
};

/// The scales of a tile of rows from group `first` on, where a kind has them.
template <typename Kind>
[[gnu::always_inline]] inline const float* row_scales_at(const TileGemmTask& task,
                                                         int64_t row_tile,
                                                         int64_t first) {
  return Kind::kRowScales ? task.x_group_scales + (row_tile * task.w.groups + first) * 16 : nullptr;
}

/// Fewer columns than a slab, without a pipeline.
template <typename Kind, int kProducts>
void multiply_part(const TileGemmTask& task,
                   PanelStep& step,
                   const PanelPair& panel,
                   uint8_t* sums,
                   const float* scales) {
  const KBlock& block = step.block;
  const int64_t groups = block.count / kProducts;
  for (int64_t row = 0; row < task.m; row += 16) {
    for (int64_t i = 0; i < step.tiles; ++i) {
      auto* kept = reinterpret_cast<float*>(kept_sums(task, row, step.tile_in_block + i));
      F32x16 total[16];
#pragma GCC unroll 16
      for (int64_t r = 0; r < 16; ++r) {
        total[r] = block.starts ? Simd::set(0.0F) : Simd::load(kept + r * 16);
      }
      const uint8_t* x = block_rows(task, block, row);
      const uint8_t* w = panel.tiles[i];
      const float* row_scales = row_scales_at<Kind>(task, row / 16, block.first / kProducts);
      for (int64_t group = 0; group < groups; ++group) {
        step.ahead.step();
        zero_tile<0>();
        for (int64_t p = 0; p < kProducts; ++p, x += kTileBytes, w += kTileBytes) {
          load_tile<4>(x);
          load_tile<6>(w);
          Kind::template product<0, 4, 6>();
        }
        store_tile<0>(sums);
        add_group<Kind>(sums, Simd::load(scales + (i * groups + group) * 16),
                        row_scales + group * (Kind::kRowScales ? 16 : 0), total);
      }
#pragma GCC unroll 16
      for (int64_t r = 0; r < 16; ++r) {
        Simd::store(kept + r * 16, total[r]);
      }
    }
  }
}

/// Results of a block of weight tiles, row by row: memory takes long runs of a row faster than
/// pieces of many rows.
inline void write_block(const TileGemmTask& given, int64_t tile_begin, int64_t tile_end) {
  const TileGemmTask task = given;  // which no result can change
  const StoreForm form = store_form(task, tile_begin, tile_end - tile_begin);
  for (int64_t row = 0; row < task.m; ++row) {
    const auto* sums = reinterpret_cast<const float*>(kept_sums(task, row, 0) + row % 16 * 64);
    for (int64_t tile = tile_begin; tile < tile_end; tile += kStepTiles) {
      const F32x16 low = with_token_scale(task, row, Simd::load(sums));
      const F32x16 high = with_token_scale(task, row, Simd::load(sums + kTileBytes / 4));
      if (form != StoreForm::kApart) {
        store_pair(form, result_at(task, row, tile), low, high);
      } else {
        write_tile_row(task, row, tile, low);
        if (tile + 1 < tile_end) {
          write_tile_row(task, row, tile + 1, high);
        }
      }
      sums += pair_stride(task) / 4;
    }
  }
  _mm_sfence();  // before another thread is told
}

/// The steps of a product with weights in groups of 32, 64 or 128 columns, kMainRows tiles of rows
/// at once.
template <typename Panel, typename Kind, int kProducts, int kMainRows>
class GroupedSteps {
 public:
  explicit GroupedSteps(const TileGemmTask& task)
      : task_(task),
        ring_(task.scratch + kStepTiles * kSlabPieces * kTileBytes),
        other_ring_(ring_ + Main::places().count * kTileBytes),
        unused_(reinterpret_cast<float*>(other_ring_ + kStepTiles * kSlabPieces * kTileBytes)),
        scales_{unused_ + 4 * kTileBytes / 4, unused_ + 5 * kTileBytes / 4},
        panels_(task),
        main_(ring_, unused_) {}

  void run(PanelStep& step) {
    multiply(step);
    if (step.closes_block) {
      write_block(task_, step.tile - step.tile_in_block, step.tile + step.tiles);
    }
  }

  /// A little is fetched ahead with every group: what rows need from the second level waits behind.
  [[nodiscard]] int64_t ahead_steps(const KBlock& block) const {
    const int64_t groups = (task_.m + 15) / 16 * block.count / kProducts;
    return (groups + kMainRows - 1) / kMainRows;
  }

 private:
  using Main = GroupPipeline<Panel, Kind, kProducts, kMainRows, kStepTiles>;

  void multiply(PanelStep& step) {
    std::swap(scales_[0], scales_[1]);  // the pipeline needs those of the step before
    unpack_scales(step);
    const int64_t row_tiles = (task_.m + 15) / 16;
    if (step.block.count != kSlabPieces) {
      main_.drain();
      step.next_tiles = 0;  // nothing is expanded meanwhile
      return multiply_part<Kind, kProducts>(task_, step, panels_.begin(step), other_ring_,
                                            scales_[0]);
    }
    const PanelPair panel = panels_.begin(step);
    GroupedSlab slab{
        block_rows(task_, step.block, 0),
        task_.scratch,
        {panel.next[0], panel.next[1]},
        {reinterpret_cast<float*>(kept_sums(task_, 0, step.tile_in_block)), scales_[0],
         step.block.starts, row_scales_at<Kind>(task_, 0, step.block.first / kProducts),
         Kind::kRowScales ? task_.w.groups * 16 : 0}};
    if (step.tiles == 1) {
      return run_apart<1>(slab, 0, row_tiles, step.ahead);
    }
    const int64_t together = row_tiles / kMainRows * kMainRows;
    if (together < row_tiles) {
      slab.next[0] = nullptr;
    }
    main_.run(slab, 0, together, step.ahead);
    if (together < row_tiles) {
      slab.next[0] = panel.next[0];
      return run_apart<kStepTiles>(slab, together, row_tiles, step.ahead);
    }
    if (step.block.ends) {
      main_.drain();
    }
  }

  template <int kTiles>
  void run_apart(const GroupedSlab& slab, int64_t begin, int64_t end, Ahead& ahead) {
    main_.drain();  // its last sums are in the tiles
    GroupPipeline<Panel, Kind, kProducts, 1, kTiles> pipeline(other_ring_, unused_);
    pipeline.run(slab, begin, end, ahead);
    pipeline.drain();
  }

  void unpack_scales(const PanelStep& step) {
    float* out = scales_[0];
    for (int64_t i = 0; i < step.tiles; ++i) {
      int64_t index = (step.tile + i) * task_.w.groups + step.block.first / kProducts;
      for (int64_t p = 0; p < step.block.count; p += kProducts, out += 16) {
        Simd::store(out, load_scales(task_.w, index++));
      }
    }
  }

  const TileGemmTask& task_;
  uint8_t* ring_;
  uint8_t* other_ring_;
  float* unused_;
  float* scales_[2];
  Panels<Panel> panels_;
  Main main_;
};

template <typename Panel, typename Kind, int kProducts, int kMainRows>
void multiply_grouped(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  GroupedSteps<Panel, Kind, kProducts, kMainRows> steps(task);
  for_panels<Panel, Kind::kColumns>(
      task, {tile_begin, tile_end, kSlabPieces},
      [&](const KBlock& block) { return steps.ahead_steps(block); },
      [&](PanelStep& step) { steps.run(step); });
}

/// Two tiles of rows at once are the quickest, but one left over stops their pipeline in each step.
template <typename Panel, typename Kind, int kProducts>
void tile_gemm_grouped(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  constexpr int64_t kFewRowTiles = 8;
  const int64_t row_tiles = (task.m + 15) / 16;
  if constexpr (kProducts == 1 || (kProducts == 2 && Kind::kRowScales)) {
    if (row_tiles % 2 == 0 || row_tiles > kFewRowTiles) {
      return multiply_grouped<Panel, Kind, kProducts, 2>(task, tile_begin, tile_end);
    }
  }
  multiply_grouped<Panel, Kind, kProducts, 1>(task, tile_begin, tile_end);
}

}  // namespace
}  // namespace nibble::cpu
