#include "flag_checks.h"

#include <charconv>
#include <string>

#include <fmt/format.h>

namespace nibble {

CLI::Validator whole_number(int64_t least, int64_t most) {
  const auto check = [least, most](const std::string& text) -> std::string {
    int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && stop == end && value >= least && value <= most) {
      return {};
    }
    return most == std::numeric_limits<int64_t>::max()
               ? fmt::format("{} is not a whole number of at least {}", text, least)
               : fmt::format("{} is not a whole number between {} and {}", text, least, most);
  };
  return CLI::Validator(check, "");
}

CLI::Validator not_empty(const std::string& why) {
  const auto check = [why](const std::string& text) -> std::string {
    return text.empty() ? "an empty text " + why : std::string();
  };
  return CLI::Validator(check, "");
}

}  // namespace nibble
