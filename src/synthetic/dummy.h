#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "checkpoint/output_folder.h"
#include "core/dtype.h"
#include "quant/scheme.h"

namespace nibble {

/// kTiny: hidden states of 64 and all else to match; as many layers, experts and tokens as before.
enum class DummyWidths : uint8_t { kOfConfig, kTiny };

struct DummyOptions {
  std::string config;       // a config.json of an architecture that runs
  std::string destination;  // folder to create
  int64_t layers = 0;       // 0: as many as the config has, else at most that
  DummyWidths widths = DummyWidths::kOfConfig;
  uint64_t seed = 0;
  std::optional<DType> dtype;  // kF32, kF16 or kBF16: unquantized; empty: as the config says
  /// Instead of the config's own: what `nibble quantize` would make in it. `dtype` is the rest's.
  std::optional<QuantScheme> scheme;
  /// Of a mixture of experts: how all linear layers but those of routed experts are stored, namely
  /// attention, shared experts and dense layers. Experts are as without it.
  std::optional<QuantScheme> others;
  int64_t shard_bytes = int64_t{5} << 30;
  ExistingOutput existing = ExistingOutput::kRefuse;
  int threads = 0;                                                        // 0: one per core
  std::function<void(int64_t bytes_done, int64_t bytes_total)> progress;  // may be empty
};

struct DummyReport {
  std::string architecture;
  DType dtype = DType::kF32;
  int64_t layers = 0;
  int64_t tensors = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;  // weight files
  double seconds = 0;
  int64_t peak_rss_bytes = 0;
};

/// Writes a checkpoint with random weights: config.json (with fewer layers, another dtype),
/// weights, generation_config.json and a byte-level tokenizer. Dense models are written
/// unquantized, without their quantization_config, unless there is a scheme; mixtures of experts as
/// that says, see list_dummy_tensors(). Norms are 1; all other values are Gaussian with deviation
/// 0.02, drawn from 65536 quantiles, or codes and scales of such. A tensor depends on the seed, its
/// name and its type only, not on the threads or the number of layers.
///
/// The folder appears whole or not at all (OutputFolder); memory is bounded by a block of a tensor.
/// Errors: those of parse_model_config() and OutputFolder, kNotFound for the config,
/// kInvalidArgument for more layers than the config has, kResourceExhausted (disk full), kIo.
Result<DummyReport> make_dummy_checkpoint(const DummyOptions& options);

}  // namespace nibble
