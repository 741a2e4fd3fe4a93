#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/journal.h"
#include "quantizer/plan.h"

namespace nibble {

/// What became of one matrix.
struct QuantizedTensor {
  std::string name;  // module
  std::string scheme;
  std::string source;  // how it was stored
  int64_t n = 0;
  int64_t k = 0;
  int64_t bytes_in = 0;
  int64_t bytes_out = 0;
  double snr_db = 0;
  double cosine = 0;
  double max_error = 0;
  int64_t clipped = 0;
  int64_t zeros = 0;
  double scale_low = 0;
  double scale_high = 0;
  std::optional<CalibrationRecord> calibration;
};

struct QuantizeReport {
  std::vector<QuantizedTensor> tensors;  // worst first
  int64_t bytes_in = 0;                  // of all tensors of the source
  int64_t bytes_out = 0;                 // weight files
  double snr_db_mean = 0;
  double snr_db_min = 0;
  // Of this run; not in the file.
  double seconds = 0;
  int64_t peak_rss_bytes = 0;
  bool already_there = false;  // nothing was to do
  int64_t shards_done = 0;     // of a part: its complete files, and how many there are in all
  int64_t shards_total = 0;
};

inline constexpr std::string_view kReportName = "quantization_report.json";

/// The report of a plan whose jobs are all done.
///   records  by job
QuantizeReport make_report(const QuantizePlan& plan,
                           int64_t source_bytes,
                           const std::vector<std::optional<JobRecord>>& records);

/// Writes quantization_report.json and quantization_report.html into a folder, flushed: the same
/// bytes for the same plan.
///   model  name of the model
Status write_report(const QuantizeReport& report,
                    const QuantizePlan& plan,
                    std::string_view model,
                    const std::string& folder);

/// The report in a folder, if there is one and it is of this plan.
std::optional<QuantizeReport> read_report(const std::string& folder, const std::string& plan_hash);

}  // namespace nibble
