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

/// The experts that are there, of those that rows choose from.
struct PresentExperts {
  int64_t first = 0;
  int64_t count = 0;
};

/// The pairs (row, chosen expert) of a step in the order of experts, then rows, without those whose
/// expert is not there. Every expert's rows begin at a multiple of 16, so that they can lie in
/// tiles.
class ExpertSlots final {
 public:
  static constexpr int64_t kDropped = -1;

  /// Sized for so many rows with top_k experts each.
  ExpertSlots(int64_t max_rows, const PresentExperts& experts, int64_t top_k);

  /// Where routing writes: [rows, top_k]; behind sort() numbers among the present experts, for all
  /// choices that are not dropped.
  [[nodiscard]] std::span<int32_t> chosen(int64_t row) { return at(chosen_, row); }
  [[nodiscard]] std::span<float> weights(int64_t row) { return at(weights_, row); }

  /// Orders what chosen() has for the first `rows` rows.
  void sort(int64_t rows);

  [[nodiscard]] int64_t top_k() const { return top_k_; }
  /// Slots with padding, at most, for any choice.
  [[nodiscard]] int64_t capacity() const { return capacity_; }
  /// The experts that have rows, by their numbers among the present ones.
  [[nodiscard]] std::span<const ExpertRows> active() const { return active_; }
  /// The rows of an active expert.
  [[nodiscard]] const ExpertRows& rows_of(int32_t expert) const {
    return active_[place_[static_cast<size_t>(expert)]];
  }
  /// Where a row's choice lies among the padded rows, or kDropped.
  [[nodiscard]] int64_t slot_of(int64_t row, int64_t choice) const {
    return slot_of_[static_cast<size_t>(row * top_k_ + choice)];
  }

 private:
  template <typename T>
  [[nodiscard]] std::span<T> at(std::vector<T>& values, int64_t row) const {
    return {values.data() + row * top_k_, static_cast<size_t>(top_k_)};
  }

  int64_t first_expert_ = 0;
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
