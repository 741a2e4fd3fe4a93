#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// Modules whose inputs are multiplied by the Hadamard matrix of Sylvester before they are rounded,
/// as the columns of their weights were: the one online transform of compressed-tensors that runs
/// here.
struct TurnedInputs {
  std::vector<std::string> targets;  // module, "re:" pattern or a class
  std::vector<std::string> ignore;   // likewise
  int64_t block = 0;                 // so many neighbours together; 0: all columns
  std::string where;                 // "config.json: quantization_config.transform_config.R4"
};

/// What a transform_config of compressed-tensors does to inputs while the model runs; what it did
/// to weights (locations weight_input and weight_output) is in them. `where` names it.
/// kUnsupported names the field of a transform that is not computed: other locations, random
/// matrices, permuted ones; kCorrupt one that has another type than it should.
Result<std::vector<TurnedInputs>> read_transform_config(const Json& config,
                                                        const std::string& where);

/// The numbers that are turned together in the input of a module with k columns
/// (GemmInput::turn); 0: the input stays. kUnsupported for a size that is no power of two, does not
/// divide k, or where several groups target the module.
Result<int64_t> turn_of(const std::vector<TurnedInputs>& turned,
                        std::string_view module,
                        int64_t k);

/// The transform_config that says so.
[[nodiscard]] Json transform_config_json(const std::vector<TurnedInputs>& turned);

}  // namespace nibble
