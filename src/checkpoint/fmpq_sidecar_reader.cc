#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <span>
#include <utility>

#include <fmt/ranges.h>

#include "base/file.h"
#include "checkpoint/fmpq_sidecar.h"
#include "checkpoint/fmpq_sidecar_fields.h"
#include "checkpoint/sidecar_errors.h"
#include "checkpoint/weights_digest.h"

namespace nibble {
namespace {

using fmpq::bits_name;
using fmpq::columns_name;
using fmpq::kPermuteNames;
using fmpq::kRemedy;
using fmpq::kScalesNames;

constexpr SidecarErrors kErrors(kRemedy);

template <size_t kCount>
Result<size_t> read_name(const JsonReader& reader,
                         std::string_view field,
                         const std::array<std::string_view, kCount>& names) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, reader.required_string(field));
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    return kErrors.bad_field(reader.where(), field,
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
      return kErrors.bad_field(where_, "block", fmt::format("{} is none of 32, 64 and 128", block));
    }
    if (out_.parts < 1) {
      return kErrors.bad_field(where_, "parts", fmt::format("{} is not at least 1", out_.parts));
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
      return kErrors.bad_field(where_, "sites", "is missing, or no array");
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
      return kErrors.bad_field(here, "modules", "is missing, or no array of names");
    }
    for (const Json& module : modules->as_array()) {
      if (!module.is_string()) {
        return kErrors.bad_field(here, "modules", "holds " + module.dump() + ", which is no name");
      }
      const std::string& name = module.as_string();
      if (!names_.insert(name).second) {
        return kErrors.bad_field(here, "modules", name + " is named twice");
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
        return kErrors.bad_field(
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
      return kErrors.bad_field(here, "inputs",
                               fmt::format("{} is no multiple of the block {}", k, out_.block));
    }
    if (tensor->dtype != DType::kU8 || tensor->shape != std::vector<int64_t>{k / out_.block}) {
      return kErrors.bad_field(tensors_.where(*tensor), "bits",
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
      return kErrors.bad_field(
          tensors_.where(*tensor), "columns",
          fmt::format("is {} {}, but {} has {} inputs: expected I32", dtype_name(tensor->dtype),
                      shape_text(tensor->shape), here, k));
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

/// Files of before there was the field have none.
Status check_tensors_digest(const JsonReader& reader, std::span<const std::byte> file) {
  constexpr std::string_view kField = "tensors_xxh64";
  const std::string digest = bytes_digest(file);
  NIBBLE_ASSIGN_OR_RETURN(const std::string stored, reader.optional_string(kField, digest));
  return stored == digest
             ? Status()
             : kErrors.bad_field(
                   reader.where(), kField,
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
  const auto digest = weights_digest(weights, fmpq::modules_of(sidecar));
  if (!digest.ok()) {
    return make_error(StatusCode::kCorrupt, "{}: belongs to other weights: {}; {}", where,
                      digest.status().message(), kRemedy);
  }
  if (*digest != stored) {
    return kErrors.bad_field(
        where, "weights_xxh64",
        fmt::format("belongs to other weights: is {}, but these have {}", stored, *digest));
  }
  return sidecar;
}

}  // namespace

Result<FmpqSidecar> read_fmpq_sidecar(const std::string& folder, const CheckpointReader& weights) {
  auto sidecar = read_both(folder, weights);
  return sidecar.ok() ? std::move(sidecar) : kErrors.with_remedy(sidecar.status());
}

}  // namespace nibble
