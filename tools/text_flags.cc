#include "text_flags.h"

#include "flag_checks.h"

namespace nibble {

void add_window_flags(CLI::App& command, CalibrationTextOptions& text) {
  command.add_option("--calibration-windows", text.windows, "Windows of the text, at most")
      ->check(whole_number(1))
      ->capture_default_str();
  command.add_option("--calibration-length", text.length, "Tokens of each window")
      ->check(whole_number(2))
      ->default_str("512, or the model's context");
}

}  // namespace nibble
