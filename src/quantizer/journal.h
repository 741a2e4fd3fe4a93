#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/shared_file.h"
#include "base/status.h"
#include "quantizer/digest.h"
#include "quantizer/encoder.h"

namespace nibble {

/// What calibration made of a matrix.
struct CalibrationRecord {
  std::string rounding;  // that was kept: "gptq"
  double error = 0;      // of the outputs, in squares, over the outputs' own
  double rtn_error = 0;  // the same of rounding to the nearest
  int64_t rows = 0;      // of inputs that it saw
  std::string fallback;  // why the method could not be applied: "few rows"; empty: it was
};

/// What is known of a job that is done.
struct JobRecord {
  std::vector<Digest> digests;  // one for each output
  RowsError error;              // of an encoded matrix
  std::optional<CalibrationRecord> calibration;
};

/// What a journal says, up to its first line that is torn or damaged.
struct JournalContent {
  std::string plan;  // hash; empty when there is no valid first line
  std::unordered_map<std::string, JobRecord> jobs;
  std::unordered_set<std::string> shards;  // file names that are complete
  int64_t valid_bytes = 0;
};

/// Reads a journal; a missing file is an empty journal.
Result<JournalContent> read_journal(const std::string& path);

/// A log of finished work that survives a crash of process or machine: a text file that is only
/// appended to, every line with its own checksum. It holds an exclusive lock on its file. Not
/// thread-safe.
///   line    "CHECKSUM JSON\n", the checksum being XXH3-128 of the JSON text
///   first   {"nibble_journal": 1, "plan": HASH}
///   then    {"job": NAME, "xxh3": [HASH of each tensor], "error": [...]} and {"shard": FILE}; a
///   job
///           that was calibrated has "calibration": [ROUNDING, error, rtn_error, rows], and where
///           the method could not be applied the reason behind them; fractions are the bits of a
///           double
class Journal final {
 public:
  /// Continues the journal at `path` after its valid lines, or begins it. The content, if any, must
  /// be of this plan. kUnavailable when another process holds the lock.
  static Result<Journal> open(const std::string& path,
                              const std::string& plan,
                              JournalContent& content);

  Status add_job(const std::string& name, const JobRecord& record);
  Status add_shard(const std::string& file);
  /// Flushes to the device.
  Status sync() { return file_.sync(); }

 private:
  explicit Journal(SharedFile file) : file_(std::move(file)) {}
  Status append(const std::string& json);

  SharedFile file_;
  int64_t end_ = 0;
};

}  // namespace nibble
