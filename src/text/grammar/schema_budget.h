#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// What the schemas of one request may cost all together, so that neither reading them nor
/// preparing their grammar takes long or much memory. Errors: kInvalidArgument with the pointer of
/// the place where it is too much.
class SchemaBudget final {
 public:
  /// Bytes of a schema, as JSON.
  Status take_bytes(size_t bytes);
  /// Steps of reading: references followed, values compared.
  Status take_steps(std::string_view pointer, int64_t steps);
  /// Cost of preparing what a place adds to the grammar, as in grammar_cost.h.
  Status take_cost(std::string_view pointer, int64_t cost);

 private:
  size_t bytes_ = 0;
  int64_t steps_ = 0;
  int64_t cost_ = 0;
};

}  // namespace nibble
