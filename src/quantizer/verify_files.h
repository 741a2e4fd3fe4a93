#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// A JSON file; errors name it.
Result<Json> read_json(const std::string& path);

/// What quantization_report.json says: signal to noise in dB of every module it lists.
struct ReportedFigures {
  bool found = false;
  std::map<std::string, double, std::less<>> tensors;
};
/// Not found is no error. kCorrupt when the file says something else than a report.
Result<ReportedFigures> read_reported_figures(const std::string& folder);

/// Whether the result has a quantized output head, so that its config.json may say that the head
/// is not the table of the embeddings where the source's says that it is.
enum class ResultHead : uint8_t { kAsInSource, kOwn };

struct FileComparison {
  int64_t equal = 0;
  std::vector<std::string> problems;
};
/// Compares the small files of a model folder with those of the folder it was made from:
/// tokenizers, templates and the like byte for byte, config.json apart from every
/// quantization_config and from what ResultHead allows.
Result<FileComparison> compare_model_files(const std::string& source,
                                           const std::string& destination,
                                           ResultHead head);

}  // namespace nibble
