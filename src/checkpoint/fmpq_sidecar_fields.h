#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/fmpq_sidecar.h"

// What the reader and the writer of a sidecar's files have in common.
namespace nibble::fmpq {

inline constexpr std::string_view kRemedy =
    "calibrate the model again (nibble quantize --scheme NAME --calibrate TEXT), or run it with "
    "--ignore-fmpq";
inline constexpr std::array<std::string_view, 3> kPermuteNames = {"none", "fold", "gather"};
// Of BlockScales.
inline constexpr std::array<std::string_view, 3> kScalesNames = {"block", "class", "bf16"};

[[nodiscard]] inline std::string bits_name(size_t site) {
  return fmt::format("sites.{}.bits", site);
}
[[nodiscard]] inline std::string columns_name(size_t site) {
  return fmt::format("sites.{}.columns", site);
}

/// The first version that says all of it.
[[nodiscard]] inline int64_t version_of(const FmpqSidecar& sidecar) {
  if (sidecar.scales == BlockScales::kWide) {
    return 3;
  }
  const bool rows = std::ranges::any_of(
      sidecar.sites, [](const FmpqSidecar::Site& site) { return site.rows != 1; });
  return rows ? 2 : 1;
}

[[nodiscard]] inline std::vector<std::string> modules_of(const FmpqSidecar& sidecar) {
  std::vector<std::string> modules;
  for (const FmpqSidecar::Site& site : sidecar.sites) {
    modules.insert(modules.end(), site.modules.begin(), site.modules.end());
  }
  return modules;
}

}  // namespace nibble::fmpq
