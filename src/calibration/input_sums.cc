#include "calibration/input_sums.h"

namespace nibble {

void InputSums::add(const Rows& rows, ThreadPool& pool) {
  if (form.act.columns != nullptr) {
    order_channels(*form.act.columns, {rows.x, rows.count, gram.k()}, pool);
    if (drift) {
      order_channels(*form.act.columns, {rows.wanted, rows.count, gram.k()}, pool);
    }
  }
  round_activations(form, {rows.x, rows.count, gram.k()}, pool);
  gram.add(rows.x, rows.count, pool);
  if (drift) {
    drift->add({.x = rows.x, .wanted = rows.wanted, .count = rows.count}, pool);
  }
}

void InputSums::add_sums(const InputSums& other, double factor) {
  gram.add_sums(other.gram, factor);
  if (drift) {
    drift->add_sums(*other.drift, factor);
  }
}

int64_t InputSums::bytes(int64_t k, FloatModel with_float) {
  const int64_t matrix = 4 * k * k;
  return with_float == FloatModel::kYes ? 2 * matrix : matrix;
}

}  // namespace nibble
