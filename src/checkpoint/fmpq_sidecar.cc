#include "checkpoint/fmpq_sidecar.h"

#include <algorithm>
#include <array>

#include "checkpoint/fmpq_sidecar_fields.h"

namespace nibble {

using fmpq::kRemedy;

namespace {

Status check_permutation(const std::vector<int32_t>& columns) {
  std::vector<bool> seen(columns.size());
  for (size_t i = 0; i < columns.size(); ++i) {
    const int32_t column = columns[i];
    if (column < 0 || column >= std::ssize(columns) || seen[static_cast<size_t>(column)]) {
      return make_error(StatusCode::kCorrupt,
                        "field columns: is no permutation of {} inputs: entry {} is {}; {}",
                        columns.size(), i, column, kRemedy);
    }
    seen[static_cast<size_t>(column)] = true;
  }
  return {};
}

/// Whether the columns of a site stay inside equal parts with as many blocks of the more bits each.
Status check_parts(const FmpqSidecar& sidecar, const FmpqSidecar::Site& site) {
  const auto bad = [&](const std::string& what) {
    return make_error(StatusCode::kCorrupt, "field parts: {} parts of the inputs of {}: {}; {}",
                      sidecar.parts, site.modules.front(), what, kRemedy);
  };
  const auto blocks = std::ssize(site.precision.bits);
  if (blocks % sidecar.parts != 0) {
    return bad(fmt::format("{} blocks cannot be shared out evenly", blocks));
  }
  const int64_t each = blocks / sidecar.parts;
  const int64_t of_part = each * sidecar.block;
  const auto high = static_cast<uint8_t>(2 * low_bits(sidecar.scales));
  const auto highs = [&](int64_t part) {
    const auto begin = site.precision.bits.begin() + part * each;
    return std::count(begin, begin + each, high);
  };
  for (int64_t part = 1; part < sidecar.parts; ++part) {
    if (highs(part) != highs(0)) {
      return bad(fmt::format("part {} has {} blocks of {} bits and part 0 has {}", part,
                             highs(part), high, highs(0)));
    }
  }
  for (size_t i = 0; i < site.columns.size(); ++i) {
    if (site.columns[i] / of_part != static_cast<int64_t>(i) / of_part) {
      return bad(fmt::format("column {} takes input {} of another part", i, site.columns[i]));
    }
  }
  return {};
}

}  // namespace

const FmpqSidecar::Site* FmpqSidecar::find(std::string_view module) const {
  const auto found = std::ranges::find_if(
      sites, [&](const Site& site) { return std::ranges::count(site.modules, module) > 0; });
  return found == sites.end() ? nullptr : &*found;
}

double FmpqSidecar::share_of_bits(uint8_t bits, const CheckpointReader& weights) const {
  double found = 0.0;
  double all = 0.0;
  for (const Site& site : sites) {
    for (const std::string& module : site.modules) {
      const TensorInfo* codes = weights.find(module + ".weight_packed");
      const double work =
          codes == nullptr || codes->shape.empty()
              ? 0.0
              : site.rows * static_cast<double>(codes->shape[0] * site.precision.k());
      found += work * nibble::share_of_bits(site.precision, bits);
      all += work;
    }
  }
  return all > 0.0 ? found / all : 0.0;
}

Result<bool> announces_fmpq(const Json& config) {
  const Json* field = config.find(kFmpqConfigField);
  if (field == nullptr || field->is_null()) {
    return false;
  }
  if (!field->is_object()) {
    return make_error(StatusCode::kCorrupt, "config.json: field {}: is no object",
                      kFmpqConfigField);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string file,
                          JsonReader(*field, fmt::format("config.json: field {}", kFmpqConfigField))
                              .optional_string("file", std::string(kFmpqSidecarName)));
  if (file != kFmpqSidecarName) {
    return make_error(StatusCode::kUnsupported,
                      "config.json: field {}: names the file \"{}\", but this build reads {}: give "
                      "both files of the sidecar their names, or take the config.json that was "
                      "written with them",
                      kFmpqConfigField, file, kFmpqSidecarName);
  }
  return true;
}

Json fmpq_config_json(const FmpqSidecar& sidecar) {
  return Json::object({{"version", fmpq::version_of(sidecar)}, {"file", kFmpqSidecarName}});
}

Status check_fmpq_site(const FmpqSidecar& sidecar, const FmpqSidecar::Site& site) {
  constexpr WeightFormat kAny{.code = WeightCode::kInt4, .scale_per = ScalePer::kChannel};
  if (const Status sound = check_blocks(site.precision, sidecar.act(), kAny, site.precision.k());
      !sound.ok()) {
    return make_error(StatusCode::kCorrupt, "{}; {}", sound.message(), kRemedy);
  }
  if (!site.columns.empty() && std::ssize(site.columns) != site.precision.k()) {
    return make_error(StatusCode::kCorrupt, "field columns: has {} entries for {} inputs; {}",
                      site.columns.size(), site.precision.k(), kRemedy);
  }
  if (!(site.rows >= 0 && site.rows <= 1)) {
    return make_error(StatusCode::kCorrupt, "field rows: {} is no share from 0 to 1; {}", site.rows,
                      kRemedy);
  }
  NIBBLE_RETURN_IF_ERROR(check_permutation(site.columns));
  return site.split && sidecar.parts > 1 ? check_parts(sidecar, site) : Status();
}

std::string describe(const FmpqSidecar& sidecar, const CheckpointReader& weights) {
  constexpr std::array<std::string_view, 3> kPermuted = {"not permuted", "folded", "gathered"};
  const bool wide = sidecar.scales == BlockScales::kWide;
  return fmt::format("{} of {}, {:.1f} % of their multiply-adds with {} activations, {}",
                     sidecar.scales == BlockScales::kClass ? "classes of blocks" : "blocks",
                     sidecar.block, 100.0 * sidecar.share_of_bits(wide ? 16 : 4, weights),
                     wide ? "BF16" : "4-bit", kPermuted.at(static_cast<size_t>(sidecar.permute)));
}

}  // namespace nibble
