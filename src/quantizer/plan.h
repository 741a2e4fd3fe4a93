#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/dialect.h"
#include "checkpoint/quant_config_writer.h"
#include "checkpoint/source_matrix.h"
#include "quantizer/encoder.h"
#include "quantizer/rules.h"
#include "quantizer/shard_layout.h"

namespace nibble {

/// What makes a plan, beside the source.
struct PlanOptions {
  RuleOptions rules;
  ScaleRule scale_rule = ScaleRule::kBest;
  std::optional<Dialect> dialect;  // empty: the default of the scheme
  /// What the config says about the cache; empty: FP8 where scales are stored and the dialect can
  /// say so.
  std::optional<KvCacheScheme> kv_cache;
  int64_t shard_bytes = int64_t{5} << 30;
  Json calibration;  // how matrices are rounded beforehand (JobMaker::recipe()); null: they are not
  Json budget;       // what the rules were chosen for, for the recipe alone; null: nothing
};

/// What becomes of one matrix that is encoded, or of one tensor that passes byte for byte.
struct PlanJob {
  const SourceMatrix* matrix = nullptr;    // encoded
  const TensorInfo* tensor = nullptr;      // passed; exactly one of the two is set
  const MatrixEncoder* encoder = nullptr;  // of `matrix`
  QuantScheme scheme;                      // of `matrix`
  std::string rule;                        // what decided; empty for tensors that are no matrix
  std::vector<PlannedTensor> outputs;      // in the order of the encoder's slots
  size_t shard = 0;
  std::optional<size_t> extent_set;  // matrices that share the extent; set if the encoder needs it
  int64_t bytes_in = 0;
  /// Chunks of rows read bytes all over their tensors (codes packed along the other axis), so that
  /// pages serve many chunks.
  bool scattered = false;

  /// The module, or the tensor's name.
  [[nodiscard]] const std::string& name() const {
    return matrix != nullptr ? matrix->module() : tensor->name;
  }
  [[nodiscard]] int64_t bytes_out() const;
  /// Chunks are the units of work and of hashing; they depend on the plan alone.
  [[nodiscard]] int64_t chunk_count() const;
  /// First row (of a passed tensor: byte) of a chunk, and how many it has.
  struct Range {
    int64_t begin = 0;
    int64_t count = 0;
  };
  [[nodiscard]] Range chunk(int64_t index) const;
  /// What a chunk fills of output `output`, from the beginning of that tensor.
  [[nodiscard]] MatrixEncoder::Place place(size_t output, int64_t chunk_index) const;
  /// The mapped bytes that a chunk reads; of a scattered job, what all chunks read, for the first.
  [[nodiscard]] std::vector<std::span<const std::byte>> touched(int64_t chunk_index) const;

 private:
  friend class Planner;
  int64_t chunk_rows_ = 0;
};

/// A whole run, known from headers alone: immutable while it is carried out. Move-only; valid as
/// long as the reader.
struct QuantizePlan {
  std::vector<PlanJob> jobs;  // in file order of the source
  std::vector<PlannedShard> shards;
  std::vector<std::vector<size_t>> extent_sets;  // jobs that take one extent together
  Json calibration;                              // as PlanOptions has it
  Json quantization_config;                      // to write; null when nothing stays quantized
  bool own_head = false;  // config.json is to say that the head is not the embeddings' table
  std::string family;     // of the ready-made rules
  std::string hash;       // of everything that decides the bytes, in hexadecimal
  int64_t bytes_in = 0;   // of all jobs
  int64_t bytes_out = 0;  // weight files

  SourceModel source;
  std::vector<std::unique_ptr<MatrixEncoder>> encoders;

  [[nodiscard]] std::string header(size_t shard) const;
};

/// Decides what becomes of every tensor. Nothing but headers is read.
///   config  parsed config.json of the source
/// Errors: kInvalidArgument (a pattern without use, a protected module about to be quantized, some
/// experts of a layer left out, fused layers that would differ, nothing to quantize), kUnsupported
/// (k no multiple of the group size, schemes of different dialects, a quantized matrix that the
/// written config cannot describe), and those of list_source_matrices().
Result<QuantizePlan> make_plan(const CheckpointReader& reader,
                               const Json& config,
                               const PlanOptions& options);

}  // namespace nibble
