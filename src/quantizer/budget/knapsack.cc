#include "quantizer/budget/knapsack.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/math.h"

namespace nibble {
namespace {

using Unit = std::vector<KnapsackChoice>;

constexpr int64_t kMostParts = 32768;  // of the room: memory of a byte for each and every unit

/// A step of one unit to the next choice of its hull.
struct Step {
  size_t unit = 0;
  size_t to = 0;
  int64_t size = 0;  // more than before
  double gain = 0;   // loss less than before
};

double slope(const KnapsackChoice& a, const KnapsackChoice& b) {
  return (a.loss - b.loss) / static_cast<double>(b.size - a.size);
}

/// The choices on the lower convex hull, by size; of equal sizes that of the least loss.
std::vector<size_t> hull_of(const Unit& unit) {
  std::vector<size_t> order(unit.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, [&](size_t a, size_t b) {
    return unit[a].size != unit[b].size ? unit[a].size < unit[b].size : unit[a].loss < unit[b].loss;
  });
  std::vector<size_t> hull;
  for (const size_t next : order) {
    if (!hull.empty() && unit[next].loss >= unit[hull.back()].loss) {
      continue;  // larger, and no better
    }
    while (hull.size() > 1 && slope(unit[hull[hull.size() - 2]], unit[hull.back()]) <=
                                  slope(unit[hull.back()], unit[next])) {
      hull.pop_back();
    }
    hull.push_back(next);
  }
  return hull;
}

class Solver final {
 public:
  Solver(const std::vector<Unit>& units, int64_t capacity) : units_(units), capacity_(capacity) {}

  Result<KnapsackSolution> run() {
    NIBBLE_RETURN_IF_ERROR(start());
    relax();
    divide_room();
    while (change_one() || change_two()) {
    }
    sum_up();
    return std::move(solution_);
  }

 private:
  Status start() {
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      CHECK(!units_[unit].empty() && units_[unit].size() <= 256);
      const std::vector<size_t> hull = hull_of(units_[unit]);
      solution_.chosen.push_back(hull.front());
      for (size_t i = 1; i < hull.size(); ++i) {
        const KnapsackChoice& from = units_[unit][hull[i - 1]];
        const KnapsackChoice& to = units_[unit][hull[i]];
        steps_.push_back({unit, hull[i], to.size - from.size, from.loss - to.loss});
      }
    }
    sum_up();
    if (solution_.size > capacity_) {
      return make_error(StatusCode::kInvalidArgument,
                        "the smallest choices take {}, more than the {} that there are",
                        solution_.size, capacity_);
    }
    return {};
  }

  /// The bound.
  void relax() {
    std::ranges::stable_sort(steps_, [](const Step& a, const Step& b) {
      return a.gain * static_cast<double>(b.size) > b.gain * static_cast<double>(a.size);
    });
    int64_t left = room();
    solution_.bound = solution_.loss;
    for (const Step& step : steps_) {
      if (step.size > left) {  // a part of this one is the end of the relaxed solution
        solution_.bound -= step.gain * static_cast<double>(left) / static_cast<double>(step.size);
        return;
      }
      left -= step.size;
      solution_.bound -= step.gain;
    }
  }

  /// What a choice takes of the room, in parts; rounded up.
  [[nodiscard]] int64_t parts_of(size_t unit, size_t choice, int64_t part) const {
    const int64_t more = units_[unit][choice].size - smallest(unit);
    return ceil_div(std::max<int64_t>(more, 0), part);
  }
  [[nodiscard]] int64_t smallest(size_t unit) const {
    return std::ranges::min(units_[unit], {}, &KnapsackChoice::size).size;
  }

  /// A part of the room, of which all sizes are multiples if there are not too many then.
  [[nodiscard]] int64_t size_of_part() const {
    int64_t common = 0;
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      for (const KnapsackChoice& choice : units_[unit]) {
        common = std::gcd(common, choice.size - smallest(unit));
      }
    }
    return std::max<int64_t>({common, ceil_div(room(), kMostParts), 1});
  }

  /// least[p]: the least loss of the units so far within p parts of the room.
  void divide_room() {
    const int64_t part = size_of_part();
    const auto parts = static_cast<size_t>(room() / part) + 1;
    std::vector<double> least(parts, 0.0);
    std::vector<std::vector<uint8_t>> chosen(units_.size(), std::vector<uint8_t>(parts));
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      std::vector<double> next(parts, std::numeric_limits<double>::infinity());
      for (size_t choice = 0; choice < units_[unit].size(); ++choice) {
        const auto taken = static_cast<size_t>(parts_of(unit, choice, part));
        for (size_t p = taken; p < parts; ++p) {
          const double loss = least[p - taken] + units_[unit][choice].loss;
          if (loss < next[p]) {
            next[p] = loss;
            chosen[unit][p] = static_cast<uint8_t>(choice);
          }
        }
      }
      least = std::move(next);
    }
    size_t left = parts - 1;
    for (size_t unit = units_.size(); unit-- > 0;) {
      solution_.chosen[unit] = chosen[unit][left];
      left -= static_cast<size_t>(parts_of(unit, solution_.chosen[unit], part));
    }
    sum_up();
  }

  /// The change of one unit that gains most within the room.
  bool change_one() {
    double best = 0;
    size_t unit_of_best = 0;
    size_t best_choice = 0;
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      for (size_t to = 0; to < units_[unit].size(); ++to) {
        const auto [size, gain] = change(unit, to);
        if (gain > best && size <= room()) {
          best = gain;
          unit_of_best = unit;
          best_choice = to;
        }
      }
    }
    return best > worth_it() && take(unit_of_best, best_choice);
  }

  /// The same of two units together.
  bool change_two() {
    struct Change {
      size_t unit, to;
      int64_t size;
      double gain;
    };
    std::vector<Change> changes;
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      for (size_t to = 0; to < units_[unit].size(); ++to) {
        if (to != solution_.chosen[unit]) {
          const auto [size, gain] = change(unit, to);
          changes.push_back({unit, to, size, gain});
        }
      }
    }
    double best = 0;
    const Change* pair[2] = {nullptr, nullptr};
    for (const Change& a : changes) {
      for (const Change& b : changes) {
        if (a.gain > 0 && a.unit != b.unit && a.gain + b.gain > best && a.size + b.size <= room()) {
          best = a.gain + b.gain;
          pair[0] = &a;
          pair[1] = &b;
        }
      }
    }
    return best > worth_it() && take(pair[0]->unit, pair[0]->to) &&
           take(pair[1]->unit, pair[1]->to);
  }

  [[nodiscard]] std::pair<int64_t, double> change(size_t unit, size_t to) const {
    const KnapsackChoice& now = units_[unit][solution_.chosen[unit]];
    const KnapsackChoice& then = units_[unit][to];
    return {then.size - now.size, now.loss - then.loss};
  }

  bool take(size_t unit, size_t to) {
    solution_.chosen[unit] = to;
    sum_up();
    return true;
  }

  [[nodiscard]] int64_t room() const { return capacity_ - solution_.size; }
  /// Gains below this are rounding.
  [[nodiscard]] double worth_it() const { return 1e-9 * solution_.loss; }

  void sum_up() {
    solution_.size = 0;
    solution_.loss = 0;
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      const KnapsackChoice& choice = units_[unit][solution_.chosen[unit]];
      solution_.size += choice.size;
      solution_.loss += choice.loss;
    }
  }

  const std::vector<Unit>& units_;
  int64_t capacity_;
  std::vector<Step> steps_;
  KnapsackSolution solution_;
};

}  // namespace

Result<KnapsackSolution> solve_knapsack(const std::vector<std::vector<KnapsackChoice>>& units,
                                        int64_t capacity) {
  return Solver(units, capacity).run();
}

}  // namespace nibble
