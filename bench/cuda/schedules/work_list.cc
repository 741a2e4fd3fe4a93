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

/// Steps of a shared tile and who does them.
struct Share {
  int worker = 0;
  Run run;
};

/// In which order a worker does what it was given.
enum class Order : uint8_t {
  kOthersFirst,  // what other owners wait for, then its own
  kAsGiven,
  kInRounds  // as given, and all workers meet after each
};

class Builder final {
 public:
  Builder(const MixedTiles& tiles, int workers, Order order)
      : tiles_(tiles),
        order_(order),
        helping_(static_cast<size_t>(workers)),
        owning_(static_cast<size_t>(workers)),
        loads_(static_cast<size_t>(workers)) {}

  [[nodiscard]] int workers() const { return static_cast<int>(loads_.size()); }
  [[nodiscard]] double load(int worker) const { return loads_[static_cast<size_t>(worker)]; }
  [[nodiscard]] double cost(const Run& run) const {
    return run.steps * (run.int8 ? tiles_.int8_cost : tiles_.bf16_cost);
  }
  /// BF16 units, then INT8 ones.
  [[nodiscard]] std::vector<Run> units() const {
    std::vector<Run> units = bf16_units();
    for (int begin = 0; begin < tiles_.int8_steps; begin += tiles_.unit_blocks) {
      units.push_back({true, begin, std::min(tiles_.unit_blocks, tiles_.int8_steps - begin)});
    }
    return units;
  }
  [[nodiscard]] std::vector<Run> bf16_units() const {
    std::vector<Run> units;
    const int most = 2 * tiles_.unit_blocks;
    for (int begin = 0; begin < tiles_.bf16_steps; begin += most) {
      units.push_back({false, begin, std::min(most, tiles_.bf16_steps - begin)});
    }
    return units;
  }

  /// A whole tile for one worker.
  void give_tile(int tile, int worker) {
    std::vector<Run> runs = bf16_units();
    runs.push_back({true, 0, tiles_.int8_steps});
    own(worker, tile, -1, runs);
  }

  /// A tile for several, of whom `owner` is one: BF16 units in their order.
  void share_tile(int tile, int owner, const std::vector<Share>& shares) {
    const auto number = static_cast<int32_t>(slots_.size());
    std::vector<Run> owned;
    std::vector<Share> left[2];  // of BF16, of INT8
    const auto closing = std::find_if(shares.rbegin(), shares.rend(), [&](const Share& share) {
      return share.run.int8 && share.worker == owner;
    });
    for (const Share& share : shares) {
      const bool first = left[0].empty() && order_ == Order::kOthersFirst;
      if (!share.run.int8 && share.worker == owner && first) {
        owned.push_back(share.run);
      } else if (closing == shares.rend() || &share != &*closing) {
        left[share.run.int8 ? 1 : 0].push_back(share);
      }
    }
    owned.push_back(closing == shares.rend() ? Run{true, 0, 0} : closing->run);
    int32_t slot = slot_count_;
    for (const auto& kind : left) {
      for (const Share& share : kind) {
        MixedSegment part = segment(tile, share.run);
        part.tile = number;
        part.slot = slot++;
        add(helping_, share.worker, part);
      }
    }
    slots_.push_back(
        {slot_count_, static_cast<int32_t>(left[0].size()), static_cast<int32_t>(left[1].size())});
    slot_count_ = slot;
    own(owner, tile, number, owned);
  }

  [[nodiscard]] MixedWorkList finish() const {
    MixedWorkList list;
    list.shared = slots_;
    list.slots = slot_count_;
    for (size_t w = 0; w < loads_.size(); ++w) {
      list.begins.push_back(static_cast<int32_t>(list.segments.size()));
      list.segments.insert(list.segments.end(), helping_[w].begin(), helping_[w].end());
      list.segments.insert(list.segments.end(), owning_[w].begin(), owning_[w].end());
      const auto meets = std::count_if(
          list.segments.begin() + list.begins.back(), list.segments.end(),
          [](const MixedSegment& one) { return (one.kind & MixedSegment::kMeets) != 0; });
      list.rounds = std::max(list.rounds, static_cast<int>(meets));
    }
    list.begins.push_back(static_cast<int32_t>(list.segments.size()));
    list.longest = *std::max_element(loads_.begin(), loads_.end());
    return list;
  }

 private:
  using Lists = std::vector<std::vector<MixedSegment>>;

  void add(Lists& lists, int worker, MixedSegment part) {
    const auto w = static_cast<size_t>(worker);
    if (order_ == Order::kInRounds && part.steps > 0) {
      part.kind |= MixedSegment::kMeets;
    }
    (order_ == Order::kOthersFirst ? lists : helping_)[w].push_back(part);
    loads_[w] += part.steps * (part.is_int8() ? tiles_.int8_cost : tiles_.bf16_cost);
  }
  void own(int worker, int tile, int32_t number, const std::vector<Run>& runs) {
    for (size_t i = 0; i < runs.size(); ++i) {
      MixedSegment part = segment(tile, runs[i]);
      part.tile = number;
      part.kind |= i == 0 ? MixedSegment::kOpens : 0;
      add(owning_, worker, part);
    }
  }
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
  Order order_;
  Lists helping_, owning_;  // in kOthersFirst; else all is in the first
  std::vector<double> loads_;
  std::vector<MixedSlots> slots_;
  int32_t slot_count_ = 0;
};

/// Units of all tiles go round the workers; who has a tile's last unit owns it.
void go_round(Builder& builder, int tiles) {
  const std::vector<Run> units = builder.units();
  int next = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    std::vector<Share> shares;
    for (const Run& unit : units) {
      shares.push_back({next++ % builder.workers(), unit});
    }
    builder.share_tile(tile, shares.back().worker, shares);
  }
}

/// Units of tiles first .. last - 1, the longest first, each to the worker that has least.
void balance(Builder& builder, int first, int last) {
  const std::vector<Run> units = builder.units();
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
    std::vector<Share> shares;
    for (size_t unit = 0; unit < units.size(); ++unit) {
      shares.push_back({workers[tile * units.size() + unit], units[unit]});
    }
    builder.share_tile(first + static_cast<int>(tile), shares.back().worker, shares);
  }
}

/// Cuts one tile among the workers from `first` on that have room[i] of its cost: BF16 units go
/// where most room is, the owner's first, INT8 steps fill what is left.
void cut(Builder& builder, const MixedTiles& tiles, int tile, int first, std::vector<double> room) {
  const int owner = static_cast<int>(std::max_element(room.begin(), room.end()) - room.begin());
  // Helpers end earlier, by as long as their sums take.
  for (double& one : room) {
    one -= tiles.wait_cost / static_cast<double>(room.size());
  }
  room[static_cast<size_t>(owner)] += tiles.wait_cost;
  const std::vector<Run> units = builder.bf16_units();
  std::vector<int> takers;
  for (const Run& unit : units) {
    const auto most = std::max_element(room.begin(), room.end());
    *most -= builder.cost(unit);
    takers.push_back(static_cast<int>(most - room.begin()));
  }
  std::stable_partition(takers.begin(), takers.end(), [&](int taker) { return taker == owner; });
  std::vector<Share> shares;
  for (size_t u = 0; u < units.size(); ++u) {
    shares.push_back({first + takers[u], units[u]});
  }
  double left = 0.0;
  for (double& one : room) {
    one = std::max(one, 0.0);
    left += one;
  }
  double sum = 0.0;
  int begin = 0;
  for (size_t i = 0; i < room.size(); ++i) {
    sum += room[i];
    const bool all = i + 1 == room.size() || left <= 0.0;
    const int end =
        all ? tiles.int8_steps : static_cast<int>(std::lround(sum / left * tiles.int8_steps));
    if (end > begin) {
      shares.push_back({first + static_cast<int>(i), {true, begin, end - begin}});
      begin = end;
    }
  }
  builder.share_tile(tile, first + owner, shares);
}

/// The tiles from `first` on, laid end to end by their costs, are cut into equal shares.
void decompose(Builder& builder, const MixedTiles& tiles, int first, int workers) {
  const int last = tiles.tiles();
  const double share = (last - first) * tiles.tile_cost() / workers;
  for (int tile = first; tile < last; ++tile) {
    const double begin = (tile - first) * tiles.tile_cost();
    const double end = begin + tiles.tile_cost();
    const int worker = std::min(static_cast<int>(begin / share + 1e-9), workers - 1);
    std::vector<double> room;
    for (int w = worker; w < workers && w * share < end - 1e-6; ++w) {
      room.push_back(std::min(end, (w + 1) * share) - std::max(begin, w * share));
    }
    if (room.size() == 1) {
      builder.give_tile(tile, worker);
    } else {
      cut(builder, tiles, tile, worker, std::move(room));
    }
  }
}

void give_whole(Builder& builder, int first, int last) {
  for (int tile = first; tile < last; ++tile) {
    builder.give_tile(tile, (tile - first) % builder.workers());
  }
}

/// Cost of the worker that has most when tiles are cut for `workers`, whose helpers' sums are
/// added.
double cut_cost(const MixedTiles& tiles, int count, int workers) {
  const double share = count * tiles.tile_cost() / workers;
  const int parts = static_cast<int>(std::ceil(static_cast<double>(workers) / count - 1e-9));
  // Shares that are no whole part of a tile reach into the next one's.
  const int helpers = workers % count == 0 ? parts - 1 : parts;
  return share + (helpers > 0 ? tiles.wait_cost + helpers * tiles.helper_cost : 0.0);
}

/// A full wave is cut together with what is left over, so that a tile has one helper at most; fewer
/// tiles than workers, for all of these, or for as many as tiles have equal parts. Or none is.
void decompose_best(Builder& builder, const MixedTiles& tiles) {
  const int count = tiles.tiles(), workers = builder.workers(), rest = count % workers;
  const int kept = rest == 0 ? count : std::max(count - rest - workers, 0);
  const int left = count - kept;
  int best = 0;  // workers that share what is left; 0: tiles stay whole
  double least = tiles.tile_cost() * ((left + workers - 1) / workers);
  const auto consider = [&](int wanted) {
    const double cost = cut_cost(tiles, left, wanted);
    if (cost < least) {
      least = cost;
      best = wanted;
    }
  };
  for (int parts = 2; left > 0 && parts * left <= workers; ++parts) {
    consider(parts * left);
  }
  if (left > 0) {
    consider(workers);
  }
  if (best > 0) {
    decompose(builder, tiles, kept, best);
  }
  give_whole(builder, 0, best > 0 ? kept : count);
}

/// Whole tiles while there is one for each worker, then units of the rest, unless that gains less
/// than it costs.
void remap(Builder& builder, const MixedTiles& tiles) {
  const int count = tiles.tiles(), rest = count % builder.workers();
  const double gain =
      rest == 0 ? 0.0 : tiles.tile_cost() * (1.0 - static_cast<double>(rest) / builder.workers());
  const bool whole = gain <= tiles.wait_cost + tiles.helper_cost;
  if (!whole) {
    balance(builder, count - rest, count);
  }
  give_whole(builder, 0, whole ? count : count - rest);
}

}  // namespace

MixedWorkList make_work_list(const MixedTiles& tiles, MixedSchedule schedule, int workers) {
  const Order order = schedule == MixedSchedule::kLockStep     ? Order::kInRounds
                      : schedule == MixedSchedule::kRoundRobin ? Order::kAsGiven
                                                               : Order::kOthersFirst;
  Builder builder(tiles, workers, order);
  switch (schedule) {
    case MixedSchedule::kLockStep:
    case MixedSchedule::kRoundRobin:
      go_round(builder, tiles.tiles());
      break;
    case MixedSchedule::kBalanced:
      balance(builder, 0, tiles.tiles());
      break;
    case MixedSchedule::kRemapped:
      remap(builder, tiles);
      break;
    case MixedSchedule::kDecomposed:
      decompose_best(builder, tiles);
      break;
  }
  return builder.finish();
}

}  // namespace nibble::cuda
