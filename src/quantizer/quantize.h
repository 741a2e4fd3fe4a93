#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/output_folder.h"
#include "quant/scheme.h"
#include "quantizer/rtn.h"

namespace nibble {

struct QuantizeProgress {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
  std::string tensor;  // just finished
};

struct QuantizeOptions {
  std::string source;       // folder of an unquantized model
  std::string destination;  // folder to create
  QuantScheme scheme;
  ScaleRule rule = ScaleRule::kBest;
  /// Modules to leave alone or to quantize although they are excluded by default: exact names
  /// without ".weight", or "re:" patterns. One that matches nothing is an error.
  std::vector<std::string> ignore;
  std::vector<std::string> include;
  int64_t shard_bytes = int64_t{5} << 30;
  ExistingOutput existing = ExistingOutput::kRefuse;
  int threads = 0;                                        // 0: as many as the machine has
  std::function<void(const QuantizeProgress&)> progress;  // may be empty; called on one thread
};

struct QuantizedTensor {
  std::string name;  // module
  double snr_db = 0;
  int64_t bytes_in = 0;
  int64_t bytes_out = 0;
};

struct QuantizeReport {
  std::vector<QuantizedTensor> tensors;  // worst first
  int64_t bytes_in = 0;                  // tensor data read
  int64_t bytes_out = 0;                 // weight files written
  double seconds = 0;
  int64_t peak_rss_bytes = 0;
  double snr_db_mean = 0;
  double snr_db_min = 0;
};

/// Quantizes every linear layer of a model folder, by rounding to nearest, into a new folder that
/// compressed-tensors loaders understand; all other tensors and files pass byte for byte. Excluded
/// by default: embeddings, norms, routers and lm_head.
///
/// The output appears at once and whole, or not at all: it is built in "DESTINATION.tmp-<pid>",
/// flushed and renamed. Folders that killed runs left are removed by the next run. Memory: one
/// tensor and its codes. The result does not depend on the number of threads.
///
/// Errors: kAlreadyExists, kInvalidArgument (patterns, an unquantized scheme), kUnsupported (source
/// already quantized, input channels that are no multiple of the group size), kCorrupt (NaN in
/// weights), kResourceExhausted (disk full), kNotFound, kIo.
Result<QuantizeReport> quantize_checkpoint(const QuantizeOptions& options);

/// Whether the default rules quantize a matrix of this module.
[[nodiscard]] bool quantizable_by_default(std::string_view module);

}  // namespace nibble
