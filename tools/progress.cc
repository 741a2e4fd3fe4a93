#include "progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

namespace nibble {
namespace {

constexpr std::chrono::milliseconds kRedrawAfter(100);

// Whole percent, never rounded up to 100.
int64_t percent_of(int64_t done, int64_t total) {
  return total <= 0
             ? 100
             : static_cast<int64_t>(100.0 * static_cast<double>(done) / static_cast<double>(total));
}

std::string rate_text(double per_second, ProgressDisplay::Unit unit) {
  constexpr double kMega = 1e6;
  constexpr double kGiga = 1e9;
  if (unit == ProgressDisplay::Unit::kTokens) {
    return fmt::format("{:.0f} tokens/s", per_second);
  }
  if (unit == ProgressDisplay::Unit::kItems) {
    return fmt::format("{:.1f} items/s", per_second);
  }
  return per_second < kGiga ? fmt::format("{:.1f} MB/s", per_second / kMega)
                            : fmt::format("{:.2f} GB/s", per_second / kGiga);
}

// "1:05" or "2:00:07".
std::string clock_text(double seconds) {
  constexpr double kLongest = 359999;  // 99:59:59
  const int64_t whole = std::lround(std::min(seconds, kLongest));
  return whole < 3600 ? fmt::format("{}:{:02}", whole / 60, whole % 60)
                      : fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

// done and total: of what this run has to do.
std::string rate_and_time(int64_t done, int64_t total, double seconds, ProgressDisplay::Unit unit) {
  const double rate = static_cast<double>(done) / std::max(seconds, 1e-9);
  if (done >= total) {
    return fmt::format("{}, took {}", rate_text(rate, unit), clock_text(seconds));
  }
  const std::string left =
      done > 0 ? clock_text(static_cast<double>(total - done) / rate) : std::string("?");
  return fmt::format("{}, {} left", rate_text(rate, unit), left);
}

}  // namespace

std::string progress_text(
    int64_t done, int64_t total, double seconds, ProgressDisplay::Unit unit, int64_t before) {
  constexpr int64_t kWidth = 30;
  const int64_t percent = percent_of(done, total);
  const auto filled = static_cast<size_t>(percent * kWidth / 100);
  return fmt::format("[{}{}] {:3}% {}", std::string(filled, '#'), std::string(kWidth - filled, '.'),
                     percent, rate_and_time(done - before, total - before, seconds, unit));
}

ProgressDisplay::ProgressDisplay(std::string verb, Unit unit)
    : verb_(std::move(verb)),
      unit_(unit),
      terminal_(::isatty(STDERR_FILENO) != 0),
      start_(Clock::now()) {}

void ProgressDisplay::update(int64_t done,
                             int64_t total,
                             std::string_view detail,
                             std::string_view more) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - start_).count();
  if (terminal_) {
    if (done >= total || now - last_drawn_ >= kRedrawAfter) {
      last_drawn_ = now;
      std::fputs(
          fmt::format("\r{}{}{}\x1b[K{}", progress_text(done, total, seconds, unit_, before_),
                      more.empty() ? "" : ", ", more, done >= total ? "\n" : "")
              .c_str(),
          stderr);
    }
    return;
  }
  const int64_t percent = percent_of(done, total);
  if (percent / 10 > last_tenth_) {
    last_tenth_ = percent / 10;
    std::fputs(fmt::format("{} {}%{}{}{}, {}{}{}\n", verb_, percent, detail.empty() ? "" : " (",
                           detail, detail.empty() ? "" : ")",
                           rate_and_time(done - before_, total - before_, seconds, unit_),
                           more.empty() ? "" : ", ", more)
                   .c_str(),
               stderr);
  }
}

}  // namespace nibble
