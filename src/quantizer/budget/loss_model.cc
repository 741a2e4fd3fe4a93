#include "quantizer/budget/loss_model.h"

#include <cmath>
#include <iterator>
#include <map>

namespace nibble {
namespace {

/// Empty where nothing was measured, or rounding changed nothing.
std::optional<double> own_weight(const KnownLoss& loss) {
  return loss.kld && *loss.kld > 0 && loss.error > 0 ? std::optional(*loss.kld / loss.error)
                                                     : std::nullopt;
}

using ByLayer = std::map<int64_t, double>;

double between(const ByLayer& logs, int64_t layer) {
  const auto above = logs.lower_bound(layer);
  if (above == logs.end()) {
    return std::prev(above)->second;
  }
  if (above == logs.begin() || above->first == layer) {
    return above->second;
  }
  const auto below = std::prev(above);
  const double share =
      static_cast<double>(layer - below->first) / static_cast<double>(above->first - below->first);
  return below->second + share * (above->second - below->second);
}

}  // namespace

std::vector<double> loss_weights(std::span<const KnownLoss> known) {
  std::map<std::string, ByLayer> kinds;
  double sum = 0;
  int count = 0;
  for (const KnownLoss& loss : known) {
    if (const auto weight = own_weight(loss)) {
      kinds[loss.kind][loss.layer] = std::log(*weight);
      sum += std::log(*weight);
      ++count;
    }
  }
  for (auto& [kind, logs] : kinds) {
    if (logs.size() > 2) {
      logs.erase(logs.begin());
      logs.erase(std::prev(logs.end()));
    }
  }
  const double usual = count == 0 ? 0 : sum / count;
  std::vector<double> weights;
  for (const KnownLoss& loss : known) {
    const auto kind = kinds.find(loss.kind);
    const double log = kind == kinds.end() ? usual : between(kind->second, loss.layer);
    weights.push_back(own_weight(loss).value_or(std::exp(log)));
  }
  return weights;
}

}  // namespace nibble
