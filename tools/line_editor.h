#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "interrupts.h"

namespace nibble {

/// Lines of standard input: on a terminal with editing and history, of any length, else as they
/// come. A paste is one piece of a line: where it has several lines or is long, the line shows a
/// mark in its place.
class LineEditor {
 public:
  enum class Outcome { kLine, kInterrupted, kEnd };

  /// history: a file that keeps lines from session to session; "": this session only. Errors: the
  /// file cannot be read.
  static Result<std::unique_ptr<LineEditor>> open(Interrupts& interrupts,
                                                  const std::string& history);
  virtual ~LineEditor() = default;

  /// Reads the next line into `line`, behind `prompt`. Ctrl-C drops what was typed of it.
  virtual Outcome next(const std::string& prompt, std::string& line) = 0;
  [[nodiscard]] virtual bool terminal() const = 0;
};

}  // namespace nibble
