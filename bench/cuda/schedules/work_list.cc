#include "bench/cuda/schedules/work_list.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <utility>

namespace nibble::cuda {
namespace {

/// Steps of one precision, part of a tile.
struct Run {
  bool int8 = false;
  int begin = 0, steps = 0;
};

class Builder final {
 public:
  Builder(const MixedTiles& tiles, int workers)
      : tiles_(tiles),
        shared_(static_cast<size_t>(workers)),
        alone_(static_cast<size_t>(workers)),
        loads_(static_cast<size_t>(workers)) {}

  [[nodiscard]] int workers() const { return static_cast<int>(loads_.size()); }
  [[nodiscard]] double load(int worker) const { return loads_[static_cast<size_t>(worker)]; }
  [[nodiscard]] double cost(const Run& run) const {
    return run.steps * (run.int8 ? tiles_.int8_cost : tiles_.bf16_cost);
  }
  [[nodiscard]] std::vector<Run> bf16_units() const {
    std::vector<Run> units;
    const int most = 2 * tiles_.unit_blocks;
    for (int begin = 0; begin < tiles_.bf16_steps; begin += most) {
      units.push_back({false, begin, std::min(most, tiles_.bf16_steps - begin)});
    }
    return units;
  }
  [[nodiscard]] std::vector<Run> int8_units() const {
    std::vector<Run> units;
    for (int begin = 0; begin < tiles_.int8_steps; begin += tiles_.unit_blocks) {
      units.push_back({true, begin, std::min(tiles_.unit_blocks, tiles_.int8_steps - begin)});
    }
    return units;
  }

  /// A whole tile for one worker.
  void give_tile(int tile, int worker) {
    auto& list = alone_[static_cast<size_t>(worker)];
    const size_t first = list.size();
    for (const Run& unit : bf16_units()) {
      list.push_back(segment(tile, unit));
    }
    list.push_back(segment(tile, {true, 0, tiles_.int8_steps}));  // which closes it
    list[first].kind |= MixedSegment::kOpens;
    loads_[static_cast<size_t>(worker)] += tiles_.tile_cost();
  }

  /// A tile for several: runs[i] for workers[i], BF16 units among them in their order.
  void share_tile(int tile, const std::vector<std::pair<int, Run>>& runs) {
    const auto number = static_cast<int32_t>(slots_.size());
    MixedSlots slots{.first = slot_count_, .bf16 = tiles_.bf16_units(), .int8 = 0};
    int bf16 = 0;
    for (const auto& [worker, run] : runs) {
      MixedSegment part = segment(tile, run);
      part.tile = number;
      part.slot = slots.first + (run.int8 ? slots.bf16 + slots.int8++ : bf16++);
      shared_[static_cast<size_t>(worker)].push_back(part);
      loads_[static_cast<size_t>(worker)] += cost(run);
    }
    slot_count_ += slots.bf16 + slots.int8;
    slots_.push_back(slots);
  }

  [[nodiscard]] MixedWorkList finish(bool lock_step) const {
    MixedWorkList list;
    list.shared = slots_;
    list.slots = slot_count_;
    for (size_t w = 0; w < loads_.size(); ++w) {
      list.begins.push_back(static_cast<int32_t>(list.segments.size()));
      list.segments.insert(list.segments.end(), shared_[w].begin(), shared_[w].end());
      list.segments.insert(list.segments.end(), alone_[w].begin(), alone_[w].end());
      if (lock_step) {
        list.rounds =
            std::max(list.rounds, static_cast<int>(list.segments.size()) - list.begins.back());
      }
    }
    list.begins.push_back(static_cast<int32_t>(list.segments.size()));
    list.longest = *std::max_element(loads_.begin(), loads_.end());
    return list;
  }

 private:
  /// Tiles that follow each other share activations within a band of token tiles, and weights.
  [[nodiscard]] MixedSegment segment(int tile, const Run& run) const {
    constexpr int kBand = 16;
    const int band = tile / (kBand * tiles_.row_tiles);
    const int rest = tile - band * kBand * tiles_.row_tiles;
    const int width = std::min(kBand, tiles_.token_tiles - band * kBand);
    return {.row_tile = rest / width,
            .token_tile = band * kBand + rest % width,
            .begin = run.begin,
            .steps = run.steps,
            .kind = run.int8 ? MixedSegment::kInt8 : 0};
  }

  const MixedTiles& tiles_;
  std::vector<std::vector<MixedSegment>> shared_, alone_;
  std::vector<double> loads_;
  std::vector<MixedSlots> slots_;
  int slot_count_ = 0;
};

std::vector<Run> units_of(const Builder& builder) {
  // INT8 units first, as the precision map's usual order is: outlier channels come last.
  std::vector<Run> units = builder.int8_units();
  const std::vector<Run> bf16 = builder.bf16_units();
  units.insert(units.end(), bf16.begin(), bf16.end());
  return units;
}

/// Units of all tiles go round the workers.
void go_round(Builder& builder, int tiles) {
  const std::vector<Run> units = units_of(builder);
  int next = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    std::vector<std::pair<int, Run>> runs;
    for (const Run& unit : units) {
      runs.emplace_back(next++ % builder.workers(), unit);
    }
    builder.share_tile(tile, runs);
  }
}

/// Units of tiles first .. last - 1, the longest first, each to the worker that has least.
void balance(Builder& builder, int first, int last) {
  const std::vector<Run> units = units_of(builder);
  const size_t tiles = static_cast<size_t>(last - first);
  std::vector<int> workers(tiles * units.size());
  std::vector<size_t> order(units.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return builder.cost(units[a]) > builder.cost(units[b]);
  });
  using Load = std::pair<double, int>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int w = 0; w < builder.workers(); ++w) {
    loads.emplace(builder.load(w), w);
  }
  for (const size_t unit : order) {
    for (size_t tile = 0; tile < tiles; ++tile) {
      const auto [load, worker] = loads.top();
      loads.pop();
      workers[tile * units.size() + unit] = worker;
      loads.emplace(load + builder.cost(units[unit]), worker);
    }
  }
  for (size_t tile = 0; tile < tiles; ++tile) {
    std::vector<std::pair<int, Run>> runs;
    for (size_t unit = 0; unit < units.size(); ++unit) {
      runs.emplace_back(workers[tile * units.size() + unit], units[unit]);
    }
    builder.share_tile(first + static_cast<int>(tile), runs);
  }
}

/// Cuts one tile among the workers from `first` on that have room[i] of its cost: BF16 units go
/// where most room is, INT8 steps fill what is left.
std::vector<std::pair<int, Run>> cut(const Builder& builder,
                                     const MixedTiles& tiles,
                                     int first,
                                     std::vector<double> room) {
  std::vector<std::pair<int, Run>> runs;
  for (const Run& unit : builder.bf16_units()) {
    const auto most = std::max_element(room.begin(), room.end());
    *most -= builder.cost(unit);
    runs.emplace_back(first + static_cast<int>(most - room.begin()), unit);
  }
  double left = 0.0;
  for (const double one : room) {
    left += std::max(one, 0.0);
  }
  double sum = 0.0;
  int begin = 0;
  for (size_t i = 0; i < room.size(); ++i) {
    sum += std::max(room[i], 0.0);
    const bool all = i + 1 == room.size() || left <= 0.0;
    const int end =
        all ? tiles.int8_steps : static_cast<int>(std::lround(sum / left * tiles.int8_steps));
    if (end > begin) {
      runs.emplace_back(first + static_cast<int>(i), Run{true, begin, end - begin});
      begin = end;
    }
  }
  return runs;
}

/// Tiles first .. last - 1, laid end to end by their costs, are cut into equal shares.
void decompose(Builder& builder, const MixedTiles& tiles, int first, int last) {
  const double share = (last - first) * tiles.tile_cost() / builder.workers();
  for (int tile = first; tile < last; ++tile) {
    const double begin = (tile - first) * tiles.tile_cost();
    const double end = begin + tiles.tile_cost();
    const int worker = std::min(static_cast<int>(begin / share + 1e-9), builder.workers() - 1);
    std::vector<double> room;
    for (int w = worker; w < builder.workers() && w * share < end - 1e-6; ++w) {
      room.push_back(std::min(end, (w + 1) * share) - std::max(begin, w * share));
    }
    if (room.size() == 1) {
      builder.give_tile(tile, worker);
    } else {
      builder.share_tile(tile, cut(builder, tiles, worker, std::move(room)));
    }
  }
}

void give_whole(Builder& builder, int first, int last) {
  for (int tile = first; tile < last; ++tile) {
    builder.give_tile(tile, (tile - first) % builder.workers());
  }
}

}  // namespace

MixedWorkList make_work_list(const MixedTiles& tiles, MixedSchedule schedule, int workers) {
  Builder builder(tiles, workers);
  const int count = tiles.tiles();
  const int rest = count % workers;
  // What the tiles of a last wave that is not full cost above an equal share of them.
  const double gain =
      rest == 0 ? 0.0 : tiles.tile_cost() * (1.0 - static_cast<double>(rest) / workers);
  const bool whole = gain <= tiles.exchange_cost;
  switch (schedule) {
    case MixedSchedule::kLockStep:
    case MixedSchedule::kRoundRobin:
      go_round(builder, count);
      break;
    case MixedSchedule::kBalanced:
      balance(builder, 0, count);
      break;
    case MixedSchedule::kRemapped:
      give_whole(builder, 0, whole ? count : count - rest);
      if (!whole) {
        balance(builder, count - rest, count);
      }
      break;
    case MixedSchedule::kDecomposed: {
      // A full wave is cut together with the rest: each of its tiles in two at most.
      const int kept = whole ? count : std::max(count - rest - workers, 0);
      if (!whole) {
        decompose(builder, tiles, kept, count);
      }
      give_whole(builder, 0, kept);
      break;
    }
  }
  return builder.finish(schedule == MixedSchedule::kLockStep);
}

}  // namespace nibble::cuda
