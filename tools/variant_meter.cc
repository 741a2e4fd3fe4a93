#include "variant_meter.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace nibble {
namespace {

/// Loading says what it loads; of the same model once more it does not.
class QuietLog final {
 public:
  QuietLog() : lower_(log_enabled(LogLevel::kInfo) && !log_enabled(LogLevel::kDebug)) {
    if (lower_) {
      set_log_level(LogLevel::kWarning);
    }
  }
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;
  ~QuietLog() {
    if (lower_) {
      set_log_level(LogLevel::kInfo);
    }
  }

 private:
  bool lower_;
};

}  // namespace

Result<std::unique_ptr<VariantMeter>> VariantMeter::open(const ModelFlags& flags,
                                                         std::vector<EvalWindow> windows,
                                                         ThreadPool& pool) {
  std::unique_ptr<VariantMeter> meter(new VariantMeter(std::move(windows), pool));
  meter->dir_ = flags.model_dir;
  NIBBLE_ASSIGN_OR_RETURN(meter->base_, open_eval_model(flags));
  int64_t longest = 0;
  for (const EvalWindow& window : meter->windows_) {
    longest = std::max(longest, std::ssize(window.tokens) - 1);
  }
  NIBBLE_ASSIGN_OR_RETURN(LogitReader reader,
                          meter->base_.reader(longest, sequences_of_step(longest)));
  meter->options_ = reader.options();
  NIBBLE_ASSIGN_OR_RETURN(meter->rows_, KeptBase::run(reader, meter->windows_));
  return meter;
}

Result<DivergenceResult> VariantMeter::measure(std::vector<ReplacedWeights> replaced) {
  const QuietLog quiet;
  NIBBLE_ASSIGN_OR_RETURN(
      const auto model,
      load_model(dir_, *base_.backend, base_.limits.model_options(), std::move(replaced)));
  NIBBLE_ASSIGN_OR_RETURN(LogitReader reader, LogitReader::create(*model, options_));
  rows_->rewind();
  return evaluate_divergence(*rows_, reader, windows_, {.pool = pool_});
}

}  // namespace nibble
