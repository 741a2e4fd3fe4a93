#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"

namespace nibble {

struct VerifyOptions {
  std::string source;       // folder of the model that was quantized
  std::string destination;  // folder of the result
  int threads = 0;          // 0: as many as the machine has
  std::function<void(int64_t bytes_done, int64_t bytes_total, const std::string& tensor)>
      progress;  // may be empty
};

/// One matrix, decoded anew from both files.
struct VerifiedMatrix {
  std::string module;
  std::string source_format;
  std::string format;
  int64_t n = 0;
  int64_t k = 0;
  double snr_db = 0;  // 200: equal
  double cosine = 1;
  float max_error = 0;
};

struct VerifyReport {
  std::vector<VerifiedMatrix> matrices;  // worst first
  int64_t copied_tensors = 0;            // equal byte for byte
  int64_t copied_files = 0;
  /// What is wrong, one sentence each, naming file or tensor; empty when all is well.
  std::vector<std::string> problems;
};

/// Reads a quantized model folder again and recomputes what became of every weight, through the
/// readers of the file formats and none of the quantizer's code. Problems are: tensors of the
/// source without counterpart or the other way round; shapes that differ; tensors or files that
/// should have been copied but differ; weights that are not finite; another config.json apart from
/// its quantization_config and, where a head was quantized, tie_word_embeddings; figures of
/// quantization_report.json that the files do not bear out.
/// Memory: 128 rows of one matrix for each thread.
/// Errors: what list_source_matrices() and CheckpointReader say of either folder, kIo;
/// kUnsupported for a result of a method that transforms the model.
Result<VerifyReport> verify_checkpoint(const VerifyOptions& options);

}  // namespace nibble
