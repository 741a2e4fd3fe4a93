#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "base/thread_pool.h"
#include "calibration/windows.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/drift.h"
#include "quantizer/algorithms/gram.h"

namespace nibble {

/// What is known of the inputs of one site.
struct InputSums {
  Gram gram;
  std::optional<Drift> drift;  // where the model without rounding reads the text, too
  RowForm form;                // that the product rounds its rows to

  InputSums(int64_t k, RowForm row_form, FloatModel with_float)
      : gram(k), form(std::move(row_form)) {
    if (with_float == FloatModel::kYes) {
      drift.emplace(k);
    }
  }

  /// Rows [count, k] f32, put into the order of the weights' columns and rounded here as the
  /// product does it, and with a drift what they are without rounding, put into that order, too.
  struct Rows {
    float* x = nullptr;
    float* wanted = nullptr;
    int64_t count = 0;
  };
  void add(const Rows& rows, ThreadPool& pool);
  /// Adds another's sums, times a factor, to these; its rows are not counted.
  void add_sums(const InputSums& other, double factor);
  /// Bytes that those of k columns take.
  static int64_t bytes(int64_t k, FloatModel with_float);
};

}  // namespace nibble
