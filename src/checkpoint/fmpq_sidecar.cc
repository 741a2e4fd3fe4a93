#include "checkpoint/fmpq_sidecar.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>
#include <utility>

#include <fmt/ranges.h>

#include "base/file.h"
#include "base/json_number.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/weights_digest.h"

namespace nibble {
namespace {

constexpr std::string_view kRemedy =
    "calibrate the model again (nibble quantize --scheme NAME --calibrate TEXT), or run it with "
    "--ignore-fmpq";
constexpr std::array<std::string_view, 3> kPermuteNames = {"none", "fold", "gather"};
// Of BlockScales.
constexpr std::array<std::string_view, 3> kScalesNames = {"block", "class", "bf16"};

Status bad_field(const std::string& where, std::string_view field, const std::string& what) {
  return make_error(StatusCode::kCorrupt, "{}: field {}: {}; {}", where, field, what, kRemedy);
}

/// Adds the remedy to what readers of JSON and of tensors say, who do not know it.
Status with_remedy(const Status& status) {
  return status.ok() || status.message().ends_with(kRemedy)
             ? status
             : make_error(status.code(), "{}; {}", status.message(), kRemedy);
}

std::string bits_name(size_t site) { return fmt::format("sites.{}.bits", site); }
std::string columns_name(size_t site) { return fmt::format("sites.{}.columns", site); }

/// The first that says all of it.
int64_t version_of(const FmpqSidecar& sidecar) {
  if (sidecar.scales == BlockScales::kWide) {
    return 3;
  }
  const bool rows = std::ranges::any_of(
      sidecar.sites, [](const FmpqSidecar::Site& site) { return site.rows != 1; });
  return rows ? 2 : 1;
}

std::vector<std::string> modules_of(const FmpqSidecar& sidecar) {
  std::vector<std::string> modules;
  for (const FmpqSidecar::Site& site : sidecar.sites) {
    modules.insert(modules.end(), site.modules.begin(), site.modules.end());
  }
  return modules;
}

template <size_t kCount>
Result<size_t> read_name(const JsonReader& reader,
                         std::string_view field,
                         const std::array<std::string_view, kCount>& names) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, reader.required_string(field));
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    return bad_field(reader.where(), field,
                     fmt::format("\"{}\" is none of {}", name, fmt::join(names, ", ")));
  }
  return static_cast<size_t>(found - names.begin());
}

/// Reads the two files of a folder.
class SidecarReader final {
 public:
  SidecarReader(const Json& json, const CheckpointReader& tensors, std::string where)
      : json_(json), reader_(json, where), tensors_(tensors), where_(std::move(where)) {}

  Result<FmpqSidecar> read() {
    NIBBLE_ASSIGN_OR_RETURN(const size_t scales, read_name(reader_, "form", kScalesNames));
    NIBBLE_ASSIGN_OR_RETURN(const size_t permute, read_name(reader_, "permute", kPermuteNames));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t block, reader_.required_int("block"));
    NIBBLE_ASSIGN_OR_RETURN(out_.parts, reader_.required_int("parts"));
    if (!is_block_size(block)) {
      return bad_field(where_, "block", fmt::format("{} is none of 32, 64 and 128", block));
    }
    if (out_.parts < 1) {
      return bad_field(where_, "parts", fmt::format("{} is not at least 1", out_.parts));
    }
    out_.scales = static_cast<BlockScales>(scales);
    out_.permute = static_cast<FmpqPermute>(permute);
    out_.block = static_cast<int>(block);
    for (const auto& [name, value] :
         {std::pair{"calibration", &out_.calibration}, {"kv", &out_.kv}}) {
      const Json* found = json_.find(name);
      *value = found == nullptr ? Json() : *found;
    }
    const Json* sites = json_.find("sites");
    if (sites == nullptr || !sites->is_array()) {
      return bad_field(where_, "sites", "is missing, or no array");
    }
    for (const Json& site : sites->as_array()) {
      NIBBLE_RETURN_IF_ERROR(read_site(site));
    }
    NIBBLE_RETURN_IF_ERROR(check_rest());
    return std::move(out_);
  }

 private:
  Status read_site(const Json& json) {
    const size_t index = out_.sites.size();
    const std::string here = fmt::format("{}: sites[{}]", where_, index);
    const JsonReader reader(json, here);
    FmpqSidecar::Site site;
    const Json* modules = json.find("modules");
    if (modules == nullptr || !modules->is_array() || modules->as_array().empty()) {
      return bad_field(here, "modules", "is missing, or no array of names");
    }
    for (const Json& module : modules->as_array()) {
      if (!module.is_string()) {
        return bad_field(here, "modules", "holds " + module.dump() + ", which is no name");
      }
      const std::string& name = module.as_string();
      if (!names_.insert(name).second) {
        return bad_field(here, "modules", name + " is named twice");
      }
      site.modules.push_back(name);
    }
    NIBBLE_ASSIGN_OR_RETURN(const double clip, reader.required_double("clip"));
    NIBBLE_ASSIGN_OR_RETURN(site.split, reader.optional_bool("split", false));
    NIBBLE_ASSIGN_OR_RETURN(site.rows, reader.optional_double("rows", 1.0));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t k, reader.required_int("inputs"));
    site.precision.block = out_.block;
    site.precision.clip = static_cast<float>(clip);
    NIBBLE_RETURN_IF_ERROR(read_bits(here, bits_name(index), k, site));
    if (out_.permute == FmpqPermute::kGather) {
      NIBBLE_RETURN_IF_ERROR(read_columns(here, columns_name(index), k, site));
    }
    const Status sound = check_fmpq_site(out_, site);
    out_.sites.push_back(std::move(site));
    return sound.with_context(here);
  }

  /// Refuses tensors that no site reads, such as the order of inputs beside another `permute`.
  [[nodiscard]] Status check_rest() const {
    for (const TensorInfo* tensor : tensors_.tensors()) {
      if (!read_.contains(tensor)) {
        return bad_field(
            where_, "sites",
            fmt::format("no site reads {} where permute is \"{}\"", tensors_.where(*tensor),
                        kPermuteNames.at(static_cast<size_t>(out_.permute))));
      }
    }
    return {};
  }

  Status read_bits(const std::string& here,
                   const std::string& name,
                   int64_t k,
                   FmpqSidecar::Site& site) {
    NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* tensor, tensors_.require(name));
    read_.insert(tensor);
    if (k < 1 || k % out_.block != 0) {
      return bad_field(here, "inputs",
                       fmt::format("{} is no multiple of the block {}", k, out_.block));
    }
    if (tensor->dtype != DType::kU8 || tensor->shape != std::vector<int64_t>{k / out_.block}) {
      return bad_field(tensors_.where(*tensor), "bits",
                       fmt::format("is {} {}, but {} inputs in blocks of {} need U8 [{}]",
                                   dtype_name(tensor->dtype), shape_text(tensor->shape), k,
                                   out_.block, k / out_.block));
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(tensor->data.data());
    site.precision.bits.assign(bytes, bytes + tensor->data.size());
    return {};
  }

  Status read_columns(const std::string& here,
                      const std::string& name,
                      int64_t k,
                      FmpqSidecar::Site& site) {
    const TensorInfo* tensor = tensors_.find(name);
    if (tensor == nullptr) {
      return {};  // the inputs of this site are not gathered
    }
    read_.insert(tensor);
    if (tensor->dtype != DType::kI32 || tensor->shape != std::vector<int64_t>{k}) {
      return bad_field(tensors_.where(*tensor), "columns",
                       fmt::format("is {} {}, but {} has {} inputs: expected I32",
                                   dtype_name(tensor->dtype), shape_text(tensor->shape), here, k));
    }
    site.columns.resize(static_cast<size_t>(k));
    std::memcpy(site.columns.data(), tensor->data.data(), tensor->data.size());
    return {};
  }

  const Json& json_;
  JsonReader reader_;
  const CheckpointReader& tensors_;
  std::string where_;
  FmpqSidecar out_;
  std::set<std::string> names_;       // of all modules so far
  std::set<const TensorInfo*> read_;  // by a site
};

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

/// A file's text, or its remedy where it is missing.
Result<std::string> read_text(const std::string& path) {
  auto text = read_file(path);
  if (!text.ok() && !file_exists(path)) {
    return make_error(StatusCode::kNotFound,
                      "{}: is missing, which config.json announces (field {}): the folder was "
                      "copied without it. Copy it, too, or {}",
                      path, kFmpqConfigField, kRemedy);
  }
  return text;
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
  return Json::object({{"version", version_of(sidecar)}, {"file", kFmpqSidecarName}});
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

namespace {

/// Files of before there was the field have none.
Status check_tensors_digest(const JsonReader& reader, std::span<const std::byte> file) {
  constexpr std::string_view kField = "tensors_xxh64";
  const std::string digest = bytes_digest(file);
  NIBBLE_ASSIGN_OR_RETURN(const std::string stored, reader.optional_string(kField, digest));
  return stored == digest
             ? Status()
             : bad_field(reader.where(), kField,
                         fmt::format("{} is not the file that was written with this one: is {}, "
                                     "but the file has {}",
                                     kFmpqTensorsName, stored, digest));
}

Result<FmpqSidecar> read_both(const std::string& folder, const CheckpointReader& weights) {
  const std::string where(kFmpqSidecarName);
  NIBBLE_ASSIGN_OR_RETURN(const std::string text,
                          read_text(fmt::format("{}/{}", folder, kFmpqSidecarName)));
  const auto json = Json::parse(text);
  if (!json.ok()) {
    return make_error(StatusCode::kCorrupt, "{}: {}; {}", where, json.status().message(), kRemedy);
  }
  const JsonReader reader(*json, where);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t version, reader.required_int("nibble_fmpq"));
  if (version < 1 || version > kFmpqVersion) {
    return make_error(StatusCode::kUnsupported,
                      "{}: field nibble_fmpq: is version {}, not 1 to {}; {}", where, version,
                      kFmpqVersion, kRemedy);
  }
  const std::string tensors_path = fmt::format("{}/{}", folder, kFmpqTensorsName);
  if (!file_exists(tensors_path)) {
    return read_text(tensors_path).status();
  }
  NIBBLE_ASSIGN_OR_RETURN(const MappedFile tensors_file, MappedFile::open(tensors_path));
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader tensors, CheckpointReader::open(tensors_path));
  NIBBLE_RETURN_IF_ERROR(check_tensors_digest(reader, tensors_file.bytes()));
  NIBBLE_ASSIGN_OR_RETURN(FmpqSidecar sidecar, SidecarReader(*json, tensors, where).read());
  NIBBLE_ASSIGN_OR_RETURN(const std::string stored, reader.required_string("weights_xxh64"));
  const auto digest = weights_digest(weights, modules_of(sidecar));
  if (!digest.ok()) {
    return make_error(StatusCode::kCorrupt, "{}: belongs to other weights: {}; {}", where,
                      digest.status().message(), kRemedy);
  }
  if (*digest != stored) {
    return bad_field(
        where, "weights_xxh64",
        fmt::format("belongs to other weights: is {}, but these have {}", stored, *digest));
  }
  return sidecar;
}

}  // namespace

Result<FmpqSidecar> read_fmpq_sidecar(const std::string& folder, const CheckpointReader& weights) {
  auto sidecar = read_both(folder, weights);
  return sidecar.ok() ? std::move(sidecar) : with_remedy(sidecar.status());
}

std::string describe(const FmpqSidecar& sidecar, const CheckpointReader& weights) {
  constexpr std::array<std::string_view, 3> kPermuted = {"not permuted", "folded", "gathered"};
  const bool wide = sidecar.scales == BlockScales::kWide;
  return fmt::format("{} of {}, {:.1f} % of their multiply-adds with {} activations, {}",
                     sidecar.scales == BlockScales::kClass ? "classes of blocks" : "blocks",
                     sidecar.block, 100.0 * sidecar.share_of_bits(wide ? 16 : 4, weights),
                     wide ? "BF16" : "4-bit", kPermuted.at(static_cast<size_t>(sidecar.permute)));
}

// --- Writing ---

namespace {

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
  NIBBLE_ASSIGN_OR_RETURN(const std::string digest, weights_digest(weights, modules_of(sidecar)));
  const std::string tensors = tensors_text(sidecar);
  JsonArray sites;
  std::ranges::transform(sidecar.sites, std::back_inserter(sites), site_json);
  const bool wide = sidecar.scales == BlockScales::kWide;
  const Json json =
      Json::object({{"nibble_fmpq", version_of(sidecar)},
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
