#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "quant/block_precision.h"

namespace nibble {

inline constexpr std::string_view kFmpqSidecarName = "nibble_fmpq.json";
inline constexpr std::string_view kFmpqTensorsName = "nibble_fmpq.safetensors";
inline constexpr int64_t kFmpqVersion = 3;  // the latest; 2 has no blocks in BF16, 1 no `rows`
/// Of config.json: an object {"version", "file"} where a folder has a sidecar.
inline constexpr std::string_view kFmpqConfigField = "nibble_fmpq";
/// What input_activations of compressed-tensors have as their strategy where inputs are gathered:
/// a name that other programs refuse, since without the sidecar the columns are not those of the
/// model.
inline constexpr std::string_view kFmpqGatherStrategy = "nibble_fmpq_gather";

/// How channels with outliers came to lie together.
enum class FmpqPermute : uint8_t {
  kNone,
  kFold,    // matrices have their rows and columns in another order; nothing is left to do
  kGather,  // columns are in another order than the inputs, which are gathered while they are read
};

/// Which blocks of activations have 4 and which 8 bits, or 8 bits and BF16, beside a model with
/// INT4 weights (docs/formats.md has the files field by field).
struct FmpqSidecar {
  /// Matrices that read the same input.
  struct Site {
    std::vector<std::string> modules;  // "model.layers.0.self_attn.q_proj"
    BlockPrecision precision;
    std::vector<int32_t> columns;  // ActSpec::columns of kGather; empty: as they are
    bool split = false;  // its columns are shared out where a model runs on several devices
    double rows = 1;     // of a step's rows that each of the modules multiplies, on average: 1, but
                         // for routed experts
  };

  BlockScales scales = BlockScales::kEach;  // tells the two precisions, too
  int block = 128;
  FmpqPermute permute = FmpqPermute::kNone;
  int64_t parts = 1;  // columns of split sites stay inside so many equal parts, which have as many
                      // blocks of the more bits each: the devices that can share the model
  std::vector<Site> sites;
  Json calibration;  // which text it is of; null: not known
  Json kv;           // which cache it was calibrated with; null: none in particular

  /// The site that a module belongs to; null: its activations stay as they are.
  [[nodiscard]] const Site* find(std::string_view module) const;
  /// How rows of its sites enter products.
  [[nodiscard]] ActFormat act() const {
    return scales == BlockScales::kWide ? ActFormat::kBf16Blocks : ActFormat::kIntBlocks;
  }
  /// Multiply-adds with activations of so many bits, of all with these sites: weighs each by its k,
  /// by what it multiplies of a step's rows, and by its weights' rows, which `weights` tells.
  [[nodiscard]] double share_of_bits(uint8_t bits, const CheckpointReader& weights) const;
};

/// Whether config.json announces a sidecar. kCorrupt for a field of another type, kUnsupported for
/// a sidecar of another name.
Result<bool> announces_fmpq(const Json& config);
/// The field of config.json that does.
[[nodiscard]] Json fmpq_config_json(const FmpqSidecar& sidecar);

/// Reads both files of a folder. Errors name file and field, and say what to do: kNotFound for a
/// file that is missing; kUnsupported for another version; kCorrupt for what is missing, of another
/// type, contradictory, not of one calibration, or belongs to other weights than these.
Result<FmpqSidecar> read_fmpq_sidecar(const std::string& folder, const CheckpointReader& weights);

/// Writes both for the weights of the same folder, each in one step, durably. Where the weights are
/// one file without index it gets one, for programs that would else read every .safetensors.
Status write_fmpq_sidecar(const FmpqSidecar& sidecar,
                          const CheckpointReader& weights,
                          const std::string& folder);

/// kCorrupt, naming the field, for a site that cannot be: bits, columns, or parts.
[[nodiscard]] Status check_fmpq_site(const FmpqSidecar& sidecar, const FmpqSidecar::Site& site);

/// "blocks of 128, 76 % of multiply-adds with 4-bit activations, folded".
[[nodiscard]] std::string describe(const FmpqSidecar& sidecar, const CheckpointReader& weights);

}  // namespace nibble
