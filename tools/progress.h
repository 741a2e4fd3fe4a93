#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace nibble {

/// Progress of a long command on stderr: on a terminal a bar with rate and time left that
/// overwrites itself, elsewhere one line per tenth.
class ProgressDisplay final {
 public:
  enum class Unit : uint8_t { kBytes, kTokens, kItems };

  /// verb: "quantized"; the unit decides how the rate is written.
  ProgressDisplay(std::string verb, Unit unit);

  /// What earlier runs did: it took no time in this one.
  void start_from(int64_t before) { before_ = before; }

  /// done of total units; `detail` (a tensor's name) stands in the plain lines, `more` in both.
  void update(int64_t done,
              int64_t total,
              std::string_view detail,
              std::string_view more = std::string_view());

 private:
  using Clock = std::chrono::steady_clock;

  std::string verb_;
  Unit unit_;
  bool terminal_;
  Clock::time_point start_;
  Clock::time_point last_drawn_;
  int64_t last_tenth_ = 0;
  int64_t before_ = 0;
};

/// "[####....]  42% 12.3 MB/s, 1:05 left": `seconds` is what done of total took. When all is done,
/// the time it took stands in place of the time left. The first `before` units took no time: an
/// earlier run did them.
[[nodiscard]] std::string progress_text(
    int64_t done, int64_t total, double seconds, ProgressDisplay::Unit unit, int64_t before = 0);

}  // namespace nibble
