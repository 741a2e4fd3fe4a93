#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/output_folder.h"
#include "quantizer/job_maker.h"
#include "quantizer/pipeline.h"
#include "quantizer/plan.h"
#include "quantizer/quantize_report.h"

namespace nibble {

/// Which share of the work a run does.
struct QuantizeShare {
  enum class Kind : uint8_t { kWhole, kPart, kFinish };

  Kind kind = Kind::kWhole;
  int part = 1;  // 1-based, of kPart
  int parts = 1;
};

/// What becomes of a run in which the maker's method could not be applied to some matrices
/// (CalibrationRecord::fallback).
enum class Fallbacks : uint8_t { kRecorded, kRefused };

struct QuantizeOptions {
  std::string source;       // folder of a model
  std::string source_name;  // in the report; empty: the folder's
  std::string destination;  // folder to create
  PlanOptions plan;
  ExistingOutput existing = ExistingOutput::kRefuse;
  QuantizeShare share;
  int threads = 0;     // 0: as many as the machine has
  int64_t memory = 0;  // resident bytes that are never exceeded; 0: 2 GiB, or what maker needs
  JobMaker* maker = nullptr;  // of jobs that are made first; null: none are
  double min_snr_db = 0;      // a tensor below it fails the run; 0: none does
  Fallbacks fallbacks = Fallbacks::kRecorded;
  const std::atomic<bool>* stop = nullptr;  // becomes true when the run should end early
  std::function<void(const QuantizeProgress&)> progress;  // may be empty; never called in parallel
};

/// Quantizes the matrices of a model folder that the rules select into a new folder that other
/// programs load too; all other tensors and files pass byte for byte. Plans first, from headers
/// alone; then streams, so that memory is bounded whatever the model's size.
///
/// The output is built in "DESTINATION.partial", with a journal of what is done, and appears at
/// once and whole. A run that was stopped, killed, or ran out of disk space is continued by the
/// same call, also after a power loss; the bytes are then those of a run without interruption. They
/// do not depend on threads, memory or the machine. A destination that is the same output already
/// is a success.
///
/// Shares: parts write disjoint sets of the weight files, in any order or at the same time, also on
/// several machines with one file system; kFinish checks that all are there and completes the
/// folder.
///
/// Errors: kAlreadyExists; those of make_plan(); kInvalidArgument (too little memory, min_snr_db
/// not reached, fallbacks that are refused, work of another plan in the way); kCorrupt (NaN in
/// weights: the work is removed); kResourceExhausted (disk full), kIo, kCancelled (stopped): the
/// work is kept; kUnavailable (another process does the same, parts missing); kNotFound.
Result<QuantizeReport> quantize_checkpoint(const QuantizeOptions& options);

/// What quantize_checkpoint() would do, without doing it: {"rules", "shards", "bytes_in",
/// "bytes_out", "tensors": [{"name", "action", "rule", "source", "shape", "bytes_in", "bytes_out",
/// "file"}]}.
Result<Json> describe_plan(const QuantizeOptions& options);

}  // namespace nibble
