#include "quantizer/budget/loss_model.h"

#include <algorithm>
#include <map>

namespace nibble {
namespace {

/// Empty where nothing was measured, or rounding changed nothing.
std::optional<double> own_weight(const KnownLoss& loss) {
  return loss.kld && *loss.kld > 0 && loss.error > 0 ? std::optional(*loss.kld / loss.error)
                                                     : std::nullopt;
}

/// Of an even number the smaller one of the middle: single large ones are not typical.
double median(std::vector<double> values) {
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace

std::vector<double> loss_weights(std::span<const KnownLoss> known) {
  std::map<std::string, std::vector<double>> typical;
  std::vector<double> all;
  for (const KnownLoss& loss : known) {
    if (const auto weight = own_weight(loss)) {
      all.push_back(*weight);
      if (loss.typical) {
        typical[loss.kind].push_back(*weight);
      }
    }
  }
  const double usual = all.empty() ? 1 : median(all);
  std::vector<double> weights;
  for (const KnownLoss& loss : known) {
    const auto kind = typical.find(loss.kind);
    weights.push_back(
        own_weight(loss).value_or(kind == typical.end() ? usual : median(kind->second)));
  }
  return weights;
}

}  // namespace nibble
