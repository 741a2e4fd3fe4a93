#include "quantizer/algorithms/block_choice.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace nibble {
namespace {

constexpr int64_t kMostParts = 8;  // devices that a product is shared by

/// What more bits take away of a block's cost with the best of its clips.
double gain_of(const BlockSite& site, size_t block) {
  const auto& low = site.costs.low[block];
  const double gain = *std::ranges::min_element(low) - site.costs.high[block];
  return site.outputs > 0 ? gain / site.outputs : 0;
}

}  // namespace

int64_t equal_parts(int64_t k, int64_t block) {
  int64_t parts = kMostParts;
  while (k % (parts * block) != 0 && parts > 1) {
    parts /= 2;
  }
  return parts;
}

BlockRanking::BlockRanking(std::vector<BlockSite> sites, uint8_t low_bits)
    : sites_(std::move(sites)), low_bits_(low_bits) {
  for (size_t site = 0; site < sites_.size(); ++site) {
    add_units(site);
  }
  std::ranges::stable_sort(units_, [](const Unit& a, const Unit& b) { return a.gain > b.gain; });
}

void BlockRanking::add_units(size_t index) {
  const BlockSite& site = sites_[index];
  const auto blocks = static_cast<int64_t>(site.costs.low.size());
  CHECK_EQ(blocks % site.parts, 0);
  work_ += site.work * blocks;
  const int64_t within = blocks / site.parts;
  std::vector<Unit> units(static_cast<size_t>(within));
  for (int64_t part = 0; part < site.parts; ++part) {
    std::vector<size_t> order(static_cast<size_t>(within));
    std::iota(order.begin(), order.end(), static_cast<size_t>(part * within));
    std::ranges::stable_sort(
        order, [&](size_t a, size_t b) { return gain_of(site, a) > gain_of(site, b); });
    for (size_t rank = 0; rank < order.size(); ++rank) {
      units[rank].blocks.push_back(order[rank]);
      units[rank].gain += gain_of(site, order[rank]);
    }
  }
  for (Unit& unit : units) {
    unit.site = index;
    unit.work = site.work * std::ssize(unit.blocks);
    constexpr double kFree = std::numeric_limits<double>::infinity();
    unit.gain = unit.work > 0 ? unit.gain / static_cast<double>(unit.work) : kFree;
    units_.push_back(std::move(unit));
  }
}

BlockChoice BlockRanking::choose(double share) const {
  BlockChoice choice;
  for (const BlockSite& site : sites_) {
    choice.sites.push_back({.bits = std::vector<uint8_t>(site.costs.low.size(), low_bits_)});
  }
  constexpr double kRounding = 1e-9;  // of a share that is a sum of the blocks'
  const double most = (share + kRounding) * static_cast<double>(work_);
  int64_t work = 0;
  for (const Unit& unit : units_) {
    if (static_cast<double>(work + unit.work) > most) {
      continue;
    }
    work += unit.work;
    for (const size_t block : unit.blocks) {
      choice.sites[unit.site].bits[block] = static_cast<uint8_t>(2 * low_bits_);
    }
  }
  choice.outlier_share = work_ > 0 ? static_cast<double>(work) / static_cast<double>(work_) : 0;
  for (size_t site = 0; site < sites_.size(); ++site) {
    choose_clip(site, choice);
  }
  return choice;
}

void BlockRanking::choose_clip(size_t index, BlockChoice& choice) const {
  const BlockSite& site = sites_[index];
  SiteBlocks& blocks = choice.sites[index];
  std::array<double, kClips.size()> errors{};
  double high = 0;
  for (size_t block = 0; block < blocks.bits.size(); ++block) {
    if (blocks.bits[block] != low_bits_) {
      high += site.costs.high[block];
      continue;
    }
    for (size_t clip = 0; clip < errors.size(); ++clip) {
      errors[clip] += site.costs.low[block][clip];
    }
  }
  // Of equal ones, as where no block has the fewer bits, the one that clips least.
  const auto best = static_cast<size_t>(
      std::ranges::min_element(errors.rbegin(), errors.rend()).base() - errors.begin() - 1);
  blocks.clip = kClips.at(best);
  choice.error += site.outputs > 0 ? (errors.at(best) + high) / site.outputs : 0;
}

double BlockRanking::least_share() const {
  double least = 1;
  for (const Unit& unit : units_) {
    if (unit.work > 0) {
      least = std::min(least, static_cast<double>(unit.work) / static_cast<double>(work_));
    }
  }
  return least;
}

}  // namespace nibble
