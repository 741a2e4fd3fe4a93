#pragma once

#include <memory>
#include <string>

#include "backend/open_backend.h"
#include "base/status.h"
#include "calibration/calibration_text.h"
#include "command.h"
#include "quantizer/quantize.h"
#include "sensitivity.h"

namespace nibble {

/// How activations in blocks of two precisions are chosen, and what was.
struct BlockFlags {
  int block = 0;  // 0: the scheme's
  double outlier_share = 0.16;
  double max_kld = 0;  // 0: --outlier-share decides
  std::string permute = "fold";
  int64_t parts = 1;    // FoundBlocks
  Json chosen;          // for recipe and report; null: nothing was chosen
  std::string summary;  // for people
};

/// Flags of `nibble quantize`.
struct QuantizeFlags {
  QuantizeOptions options;
  std::string scheme;
  std::string lm_head;
  std::string rule = "best";
  std::string format;
  std::string kv_cache;  // empty: by what is stored
  std::string others = "keep";
  std::string part;
  std::string recipe;
  std::string method;  // empty: gptq with --calibrate
  CalibrationTextOptions text;
  std::string budget;       // empty: none
  SensitivityFlags judged;  // how the schemes of a budget are chosen
  std::string choice;       // choice_text() of them
  BlockFlags blocks;
  bool calibrate_kv = false;
  BackendOptions backend = {.device = "cpu"};  // that calibrates
  bool online_rotation = false;
  bool strict = false;
  CLI::App* command = nullptr;  // knows what was given
  bool finish = false;
  bool dry_run = false;
  bool force = false;
  bool json = false;
};

/// Whether the command line has it.
[[nodiscard]] bool flag_given(const QuantizeFlags& flags, const char* flag);

/// --calibrate, --method and what goes with them, and --recipe. `flags` remembers the command.
void add_calibration_flags(CLI::App& command, QuantizeFlags& flags);

/// Takes what the recipe says for all flags that are not given. Errors: those of read_recipe();
/// kInvalidArgument where it needs a text that is not given.
Status take_recipe(QuantizeFlags& flags);

/// Whether --calibrate and the flags that need it go together; sets the default method.
Status check_calibration(QuantizeFlags& flags);

/// How the weights are rounded and what is done to them before; what `options` need for it.
class QuantizeMethod final {
 public:
  /// Carries out the method's transforms and reads the text. Changes source, maker and recipe of
  /// flags.options, which must outlive this.
  Status prepare(QuantizeFlags& flags);
  /// Of the calibration by part; null without one.
  [[nodiscard]] Json seconds() const {
    return calibrator_ == nullptr ? Json() : calibrator_->seconds();
  }
  /// Removes what was made on the way, once the output is there.
  void finish() const;
  /// The same where a command is refused and nothing in DST.partial needs it.
  void clear_if_refused(const Status& status) const;

 private:
  Status prepare_parts(QuantizeFlags& flags);

  std::unique_ptr<JobMaker> calibrator_;
  std::string destination_;  // empty: nothing was made
};

}  // namespace nibble
