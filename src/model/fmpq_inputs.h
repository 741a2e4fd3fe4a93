#pragma once

#include <map>
#include <string>

#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/linear_reader.h"
#include "checkpoint/quant_config.h"
#include "quant/act_spec.h"

namespace nibble {

/// What becomes of a sidecar that rounds activations to 4 and 8 bits (checkpoint/fmpq_sidecar.h).
enum class FmpqUse : uint8_t {
  kApplied,
  kIgnored,  // weights alone are quantized; inputs that are gathered still are
};

/// How the inputs of a model's matrices enter their products where its folder has such a sidecar.
class FmpqInputs final {
 public:
  /// Nothing where config.json announces none. The errors of read_fmpq_sidecar(); kCorrupt for a
  /// config that contradicts itself.
  static Result<FmpqInputs> open(const CheckpointReader& weights,
                                 const QuantConfig& config,
                                 FmpqUse use);

  /// Gives a module's activations the blocks and the order of its site, if it belongs to one.
  /// kCorrupt, naming module and field, where the weights are of another form than the sidecar
  /// says.
  Status apply(const std::string& module, MappedLinear& weights) const;

 private:
  std::map<std::string, ActSpec, std::less<>> inputs_;  // by module
};

}  // namespace nibble
