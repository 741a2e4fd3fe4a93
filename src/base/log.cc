#include "base/log.h"

#include <memory>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace nibble {
namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> kLogger = [] {
    auto log = std::make_shared<spdlog::logger>(
        "nibble", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    log->set_pattern("%H:%M:%S.%e %^%l%$ %v");
    log->flush_on(spdlog::level::info);
    return log;
  }();
  return *kLogger;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

}  // namespace

void set_log_level(LogLevel level) { logger().set_level(to_spdlog(level)); }

void log_line(LogLevel level, std::string_view message) { logger().log(to_spdlog(level), message); }

bool log_enabled(LogLevel level) { return logger().should_log(to_spdlog(level)); }

LogLevel log_level() {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning}) {
    if (log_enabled(level)) {
      return level;
    }
  }
  return LogLevel::kError;
}

}  // namespace nibble
