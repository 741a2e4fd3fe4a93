#pragma once

#include <cstdint>

#include "backend/step.h"

namespace nibble {

/// Sees the rows that linear layers multiply, after the norm or activation that the product does
/// while it reads them and before it rounds them: what calibration collects.
class RowObserver {
 public:
  /// Whether the product is computed, too.
  enum class Then : uint8_t { kMultiply, kSkip };

  virtual ~RowObserver() = default;
  /// Called before each product of a layer that is given this observer; Step::input_rows() makes
  /// the rows.
  virtual Then observe(Step& step, const InputRows& rows) = 0;
};

}  // namespace nibble
