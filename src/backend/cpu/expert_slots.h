#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace nibble::cpu {

/// The rows of one expert, which follow each other.
struct ExpertRows {
  int32_t expert = 0;
  int64_t first = 0;  // of the padded rows of all experts
  int64_t count = 0;
};

/// The pairs (row, chosen expert) of a step in the order of experts, then rows. Every expert's rows
/// begin at a multiple of 16, so that they can lie in tiles.
class ExpertSlots final {
 public:
  /// Sized for so many rows, each with top_k of `experts`.
  ExpertSlots(int64_t max_rows, int64_t experts, int64_t top_k);

  /// Where routing writes: [rows, top_k].
  [[nodiscard]] std::span<int32_t> chosen(int64_t row) { return at(chosen_, row); }
  [[nodiscard]] std::span<float> weights(int64_t row) { return at(weights_, row); }

  /// Orders what chosen() has for the first `rows` rows.
  void sort(int64_t rows);

  [[nodiscard]] int64_t top_k() const { return top_k_; }
  /// Slots with padding, at most, for any choice.
  [[nodiscard]] int64_t capacity() const { return capacity_; }
  /// The experts that have rows.
  [[nodiscard]] std::span<const ExpertRows> active() const { return active_; }
  /// The rows of an active expert.
  [[nodiscard]] const ExpertRows& rows_of(int32_t expert) const {
    return active_[place_[static_cast<size_t>(expert)]];
  }
  /// Where a row's choice lies among the padded rows.
  [[nodiscard]] int64_t slot_of(int64_t row, int64_t choice) const {
    return slot_of_[static_cast<size_t>(row * top_k_ + choice)];
  }

 private:
  template <typename T>
  [[nodiscard]] std::span<T> at(std::vector<T>& values, int64_t row) const {
    return {values.data() + row * top_k_, static_cast<size_t>(top_k_)};
  }

  int64_t top_k_ = 0;
  int64_t capacity_ = 0;
  std::vector<int32_t> chosen_;
  std::vector<float> weights_;
  std::vector<int64_t> next_;  // of each expert: its rows, then where the next one goes
  std::vector<ExpertRows> active_;
  std::vector<size_t> place_;  // of each expert, among active_
  std::vector<int64_t> slot_of_;
};

}  // namespace nibble::cpu
