#include <algorithm>
#include <filesystem>
#include <iterator>
#include <span>
#include <utility>

#include "base/file.h"
#include "base/json_number.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/fmpq_sidecar.h"
#include "checkpoint/fmpq_sidecar_fields.h"
#include "checkpoint/weights_digest.h"

namespace nibble {
namespace {

using fmpq::bits_name;
using fmpq::columns_name;
using fmpq::kPermuteNames;
using fmpq::kScalesNames;

/// Writes a file beside its place and gives it its name.
Status replace_file(const std::string& path, const std::string& text) {
  const std::string fresh = path + ".tmp";
  std::error_code ignored;
  std::filesystem::remove(fresh, ignored);
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(fresh));
  Status written = file.write(text);
  written = written.ok() ? file.finish() : written;
  written = written.ok() ? rename_file(fresh, path) : written;
  if (!written.ok()) {
    std::filesystem::remove(fresh, ignored);
  }
  return written;
}

/// A file with the bits of every site, and the columns of those that are gathered.
std::string tensors_text(const FmpqSidecar& sidecar) {
  std::vector<TensorPlan> plan;
  std::string data;
  const auto add = [&](std::string name, DType dtype, int64_t count, const void* numbers) {
    TensorPlan tensor{.name = std::move(name), .dtype = dtype, .shape = {count}};
    tensor.bytes = count * dtype_bits(dtype) / 8;
    data.append(static_cast<const char*>(numbers), static_cast<size_t>(tensor.bytes));
    plan.push_back(std::move(tensor));
  };
  for (size_t i = 0; i < sidecar.sites.size(); ++i) {  // larger elements come first
    const std::vector<int32_t>& columns = sidecar.sites[i].columns;
    if (!columns.empty()) {
      add(columns_name(i), DType::kI32, std::ssize(columns), columns.data());
    }
  }
  for (size_t i = 0; i < sidecar.sites.size(); ++i) {
    const std::vector<uint8_t>& bits = sidecar.sites[i].precision.bits;
    add(bits_name(i), DType::kU8, std::ssize(bits), bits.data());
  }
  return safetensors_header(plan) + data;
}

Json site_json(const FmpqSidecar::Site& site) {
  Json json = Json::object({{"modules", JsonArray(site.modules.begin(), site.modules.end())},
                            {"inputs", site.precision.k()},
                            {"clip", shortest_number(site.precision.clip)},
                            {"split", site.split}});
  if (site.rows != 1) {
    json.set("rows", site.rows);
  }
  return json;
}

/// The index of a folder whose weights are one file.
std::string index_text(const CheckpointReader& weights) {
  JsonObject map;
  int64_t total = 0;
  for (const TensorInfo* tensor : weights.tensors()) {
    map.append(tensor->name, std::string(weights.file_of(*tensor)));
    total += static_cast<int64_t>(tensor->data.size());
  }
  return Json::object(
             {{"metadata", Json::object({{"total_size", total}})}, {"weight_map", std::move(map)}})
             .dump_pretty() +
         "\n";
}

Status check_sidecar(const FmpqSidecar& sidecar) {
  for (const FmpqSidecar::Site& site : sidecar.sites) {
    if (site.modules.empty() || site.precision.block != sidecar.block) {
      return make_error(StatusCode::kInvalidArgument,
                        "{}: a site has no modules, or another block than {}", kFmpqSidecarName,
                        sidecar.block);
    }
    NIBBLE_RETURN_IF_ERROR(check_fmpq_site(sidecar, site).with_context(site.modules.front()));
  }
  return {};
}

}  // namespace

Status write_fmpq_sidecar(const FmpqSidecar& sidecar,
                          const CheckpointReader& weights,
                          const std::string& folder) {
  NIBBLE_RETURN_IF_ERROR(check_sidecar(sidecar));
  NIBBLE_ASSIGN_OR_RETURN(const std::string digest,
                          weights_digest(weights, fmpq::modules_of(sidecar)));
  const std::string tensors = tensors_text(sidecar);
  JsonArray sites;
  std::ranges::transform(sidecar.sites, std::back_inserter(sites), site_json);
  const bool wide = sidecar.scales == BlockScales::kWide;
  const Json json =
      Json::object({{"nibble_fmpq", fmpq::version_of(sidecar)},
                    {"form", kScalesNames.at(static_cast<size_t>(sidecar.scales))},
                    {"block", sidecar.block},
                    {"permute", kPermuteNames.at(static_cast<size_t>(sidecar.permute))},
                    {"parts", sidecar.parts},
                    wide ? JsonObject::Member{"bf16_share", sidecar.share_of_bits(16, weights)}
                         : JsonObject::Member{"a4_share", sidecar.share_of_bits(4, weights)},
                    {"weights_xxh64", digest},
                    {"tensors_xxh64", bytes_digest(std::as_bytes(std::span(tensors)))},
                    {"calibration", sidecar.calibration},
                    {"kv", sidecar.kv},
                    {"sites", std::move(sites)}});
  const std::string index = fmt::format("{}/model.safetensors.index.json", folder);
  if (!file_exists(index)) {
    NIBBLE_RETURN_IF_ERROR(replace_file(index, index_text(weights)));
  }
  NIBBLE_RETURN_IF_ERROR(replace_file(fmt::format("{}/{}", folder, kFmpqTensorsName), tensors));
  NIBBLE_RETURN_IF_ERROR(
      replace_file(fmt::format("{}/{}", folder, kFmpqSidecarName), json.dump_pretty() + "\n"));
  return sync_directory(folder);
}

}  // namespace nibble
