#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint_writer.h"

namespace nibble {

/// A tensor that will be written, and where.
struct PlannedTensor {
  TensorPlan tensor;
  int64_t offset = 0;  // in its file, header included
};

/// One weight file of the output.
struct PlannedShard {
  std::string name;          // "model-00001-of-00002.safetensors"
  std::vector<size_t> jobs;  // whose tensors it holds, ascending
  int64_t file_bytes = 0;
  int64_t data_begin = 0;  // length of the header
};

/// Which file every tensor goes to, and its place there: known before any data. `outputs` are the
/// tensors of each job, which stay together; offsets are set. Files are filled in order up to
/// shard_bytes of data (one larger job gets a file of its own); inside a file the tensors are
/// sorted as the reference writer does, by dtype rank descending, then name. kInvalidArgument on a
/// duplicate name.
Result<std::vector<PlannedShard>> layout_shards(std::vector<std::vector<PlannedTensor>*> outputs,
                                                int64_t shard_bytes);

/// The header of a shard whose jobs have these outputs.
[[nodiscard]] std::string shard_header(const std::vector<const PlannedTensor*>& tensors);

/// The shards that part `part` of `parts` (1-based) writes, ascending: shares of about equal
/// weight, the same on every machine.
///   weights  bytes read and written for each shard
[[nodiscard]] std::vector<size_t> shards_of_part(const std::vector<int64_t>& weights,
                                                 int part,
                                                 int parts);

}  // namespace nibble
