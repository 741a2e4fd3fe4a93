#include "bench/moe/routing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "base/check.h"

namespace nibble {

namespace {

constexpr double kZipfExponent = 1.2;

struct Name {
  std::string_view name;
  Routing routing;
};
constexpr std::array kNames = {Name{"uniform", Routing::kUniform},
                               Name{"balanced", Routing::kBalanced}, Name{"zipf", Routing::kZipf},
                               Name{"one", Routing::kOne}};

/// Swaps `count` random elements to the front. The distributions of the standard library are not
/// the same everywhere; this is.
void shuffle_front(std::span<int32_t> values, size_t count, std::mt19937_64& random) {
  for (size_t i = 0; i < count; ++i) {
    std::swap(values[i], values[i + random() % (values.size() - i)]);
  }
}

/// Above 0, below 1.
double unit(std::mt19937_64& random) {
  return (static_cast<double>(random() >> 11U) + 0.5) * 0x1p-53;
}

/// Draws experts one after the other by their weights, each once: those of the smallest e / weight,
/// where the e are exponentially distributed.
class ZipfDraws final {
 public:
  ZipfDraws(int64_t experts, std::mt19937_64& random)
      : inverse_weights_(static_cast<size_t>(experts)), draws_(static_cast<size_t>(experts)) {
    std::vector<int32_t> ranked(static_cast<size_t>(experts));
    std::iota(ranked.begin(), ranked.end(), 0);
    shuffle_front(ranked, ranked.size(), random);
    for (size_t rank = 0; rank < ranked.size(); ++rank) {
      inverse_weights_[static_cast<size_t>(ranked[rank])] =
          std::pow(static_cast<double>(rank + 1), kZipfExponent);
    }
  }

  void draw(std::span<int32_t> row, std::mt19937_64& random) {
    for (size_t expert = 0; expert < draws_.size(); ++expert) {
      draws_[expert] = {-std::log(unit(random)) * inverse_weights_[expert],
                        static_cast<int32_t>(expert)};
    }
    const auto end = draws_.begin() + std::ssize(row);
    std::ranges::partial_sort(draws_, end);
    std::transform(draws_.begin(), end, row.begin(), [](const auto& draw) { return draw.second; });
  }

 private:
  std::vector<double> inverse_weights_;
  std::vector<std::pair<double, int32_t>> draws_;
};

}  // namespace

Result<Routing> find_routing(std::string_view name) {
  const auto found = std::ranges::find(kNames, name, &Name::name);
  if (found == kNames.end()) {
    return make_error(StatusCode::kInvalidArgument, "unknown routing \"{}\"; choose one of {}",
                      name, routing_names());
  }
  return found->routing;
}

std::string_view routing_name(Routing routing) {
  return std::ranges::find(kNames, routing, &Name::routing)->name;
}

std::string routing_names() {
  std::string names;
  for (const Name& each : kNames) {
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  return names;
}

std::vector<int32_t> choose_experts(const RoutingRequest& request) {
  CHECK(request.top_k >= 1 && request.top_k <= request.experts);
  const auto experts = static_cast<size_t>(request.experts);
  const auto top_k = static_cast<size_t>(request.top_k);
  std::mt19937_64 random(request.seed);
  std::vector<int32_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  if (request.routing == Routing::kOne) {
    shuffle_front(order, top_k, random);
  }
  ZipfDraws zipf(request.experts, random);
  std::vector<int32_t> chosen(static_cast<size_t>(request.rows) * top_k);
  for (size_t row = 0; row < static_cast<size_t>(request.rows); ++row) {
    const std::span<int32_t> out = std::span(chosen).subspan(row * top_k, top_k);
    if (request.routing == Routing::kBalanced) {
      for (size_t i = 0; i < top_k; ++i) {
        out[i] = static_cast<int32_t>((row * top_k + i) % experts);
      }
    } else if (request.routing == Routing::kZipf) {
      zipf.draw(out, random);
    } else {
      if (request.routing == Routing::kUniform) {
        shuffle_front(order, top_k, random);
      }
      std::copy_n(order.begin(), top_k, out.begin());
    }
  }
  return chosen;
}

ExpertLoad load_of(std::span<const int32_t> chosen, int64_t experts) {
  std::vector<int64_t> rows(static_cast<size_t>(experts), 0);
  for (const int32_t expert : chosen) {
    ++rows[static_cast<size_t>(expert)];
  }
  const int64_t active = experts - std::ranges::count(rows, 0);
  return {.active = active,
          .most = std::ranges::max(rows),
          .mean = static_cast<double>(chosen.size()) / static_cast<double>(active)};
}

}  // namespace nibble
