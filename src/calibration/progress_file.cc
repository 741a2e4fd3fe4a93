#include "calibration/progress_file.h"

#include <filesystem>
#include <vector>

#include "base/file.h"
#include "base/json.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "calibration-";
constexpr std::string_view kProgress = "progress.json";

}  // namespace

std::string calibration_file(const std::string& folder, std::string_view name) {
  return fmt::format("{}/{}{}", folder, kPrefix, name);
}

std::optional<CalibrationProgress> read_calibration_progress(const std::string& folder) {
  const std::string path = calibration_file(folder, kProgress);
  if (!file_exists(path)) {
    return std::nullopt;
  }
  const auto text = read_file(path);
  const auto json = text.ok() ? Json::parse(*text) : Result<Json>(text.status());
  if (!json.ok()) {
    return std::nullopt;
  }
  const JsonReader reader(*json, path);
  const auto layer = reader.required_int("layer");
  const auto file = reader.required_int("file");
  const auto digest = reader.required_string("digest");
  if (!layer.ok() || !file.ok() || !digest.ok() || *file < 0 || *file > 1 || *layer < 0) {
    return std::nullopt;
  }
  return CalibrationProgress{*layer, *file, *digest};
}

Status write_calibration_progress(const std::string& folder, const CalibrationProgress& progress) {
  const std::string path = calibration_file(folder, kProgress);
  const std::string fresh = path + ".new";
  std::error_code ignored;
  fs::remove(fresh, ignored);
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(fresh));
  NIBBLE_RETURN_IF_ERROR(file.write(
      Json::object(
          {{"layer", progress.layer}, {"file", progress.file}, {"digest", progress.digest}})
          .dump()));
  NIBBLE_RETURN_IF_ERROR(file.finish());
  return rename_file(fresh, path);
}

void remove_calibration_files(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(kPrefix)) {
      files.push_back(it->path());
    }
  }
  for (const fs::path& file : files) {
    fs::remove(file, error);
  }
}

}  // namespace nibble
