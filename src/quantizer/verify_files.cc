#include "quantizer/verify_files.h"

#include <algorithm>

#include "arch/model_text.h"
#include "base/file.h"
#include "quantizer/model_files.h"
#include "quantizer/own_head.h"
#include "quantizer/quantize_report.h"

namespace nibble {
namespace {

constexpr std::string_view kConfig = "config.json";

// Members in the order of their names, without any quantization_config: equal configurations have
// equal text.
Json canonical(const Json& value) {
  if (value.is_array()) {
    JsonArray items;
    for (const Json& item : value.as_array()) {
      items.push_back(canonical(item));
    }
    return items;
  }
  if (!value.is_object()) {
    return value;
  }
  std::vector<JsonObject::Member> members;
  for (const auto& [key, member] : value.as_object()) {
    if (key != "quantization_config") {
      members.emplace_back(key, canonical(member));
    }
  }
  std::sort(members.begin(), members.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return Json::object(std::move(members));
}

Result<bool> equal_configs(const std::string& source,
                           const std::string& destination,
                           ResultHead head) {
  NIBBLE_ASSIGN_OR_RETURN(const Json before, read_config_json(source));
  NIBBLE_ASSIGN_OR_RETURN(const Json after, read_config_json(destination));
  const std::string result = canonical(after).dump();
  return result == canonical(before).dump() ||
         (head == ResultHead::kOwn && result == canonical(with_own_head(before)).dump());
}

}  // namespace

Result<Json> read_json(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  auto json = Json::parse(text);
  return json.ok() ? std::move(json) : json.status().with_context(path);
}

Result<ReportedFigures> read_reported_figures(const std::string& folder) {
  ReportedFigures figures;
  const std::string path = fmt::format("{}/{}", folder, kReportName);
  if (!file_exists(path)) {
    return figures;
  }
  figures.found = true;
  NIBBLE_ASSIGN_OR_RETURN(const Json report, read_json(path));
  const Json* tensors = report.find("tensors");
  if (tensors == nullptr || !tensors->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: no list \"tensors\"", path);
  }
  for (const Json& tensor : tensors->as_array()) {
    const Json* name = tensor.find("name");
    const Json* db = tensor.find("snr_db");
    if (name == nullptr || !name->is_string() || db == nullptr || !db->is_number()) {
      return make_error(StatusCode::kCorrupt, "{}: a tensor without name or snr_db", path);
    }
    figures.tensors[name->as_string()] = db->as_double();
  }
  return figures;
}

Result<FileComparison> compare_model_files(const std::string& source,
                                           const std::string& destination,
                                           ResultHead head) {
  FileComparison result;
  const auto note = [&](bool equal, std::string_view name) {
    if (equal) {
      ++result.equal;
    } else {
      result.problems.push_back(
          fmt::format("{}/{}: differs from that of {}", destination, name, source));
    }
  };
  NIBBLE_ASSIGN_OR_RETURN(const bool configs, equal_configs(source, destination, head));
  note(configs, kConfig);
  const auto compare = [&](const std::string& name, std::span<const std::byte> bytes) -> Status {
    const std::string path = fmt::format("{}/{}", destination, name);
    if (!file_exists(path)) {
      result.problems.push_back(fmt::format("{}: missing; {} has it", path, source));
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(const MappedFile copy, MappedFile::open(path));
    note(std::ranges::equal(bytes, copy.bytes()), name);
    return {};
  };
  NIBBLE_RETURN_IF_ERROR(visit_model_files(source, compare));
  return result;
}

}  // namespace nibble
