#pragma once

#include <string_view>

#include <fmt/core.h>

namespace nibble {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

/// Sets the smallest level that is written. Logs always go to stderr. Thread-safe.
void set_log_level(LogLevel level);
/// Writes one line to stderr, with time and level. Thread-safe.
void log_line(LogLevel level, std::string_view message);
[[nodiscard]] bool log_enabled(LogLevel level);
/// The smallest level that is written.
[[nodiscard]] LogLevel log_level();

}  // namespace nibble

/// NIBBLE_LOG(kInfo, "loaded {} tensors", n);
#define NIBBLE_LOG(level, ...)                                                   \
  do {                                                                           \
    if (::nibble::log_enabled(::nibble::LogLevel::level)) {                      \
      ::nibble::log_line(::nibble::LogLevel::level, ::fmt::format(__VA_ARGS__)); \
    }                                                                            \
  } while (false)
