#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "eval/eval_window.h"
#include "eval/logit_reader.h"
#include "quantizer/digest.h"

namespace nibble {

/// Where the logits of the base of a comparison come from, for rows in the order in which a
/// LogitReader gives them.
class BaseRows {
 public:
  virtual ~BaseRows() = default;
  /// The rows of these feeds follow.
  virtual Status begin(std::span<const Feed> feeds) = 0;
  /// [rows, vocab_size] f32: logits, or logits shifted by a constant of their row. Valid until the
  /// next call.
  virtual Result<std::span<const float>> next(int64_t rows) = 0;
  /// kCorrupt: why a row has a NaN or an infinity.
  [[nodiscard]] virtual Status explain_not_finite() const = 0;
};

/// From a model that runs beside the other one, in steps of the same limits.
class LiveBase final : public BaseRows {
 public:
  explicit LiveBase(LogitReader& reader) : reader_(reader) {}
  Status begin(std::span<const Feed> feeds) override { return reader_.begin(feeds); }
  Result<std::span<const float>> next(int64_t rows) override;
  [[nodiscard]] Status explain_not_finite() const override;

 private:
  LogitReader& reader_;
};

/// A digest of the tokens of all windows and of what is scored in them: two runs of equal digests
/// have the same rows.
[[nodiscard]] Digest digest_of_windows(std::span<const EvalWindow> windows);

}  // namespace nibble
