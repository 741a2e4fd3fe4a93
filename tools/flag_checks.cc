#include "flag_checks.h"

#include <charconv>
#include <cmath>
#include <string>

#include <fmt/format.h>

namespace nibble {
namespace {

/// A number that `accepts` takes; else the message says what was `wanted`.
template <typename Accepts>
CLI::Validator finite_number(Accepts accepts, const std::string& wanted) {
  const auto check = [accepts, wanted](const std::string& text) -> std::string {
    double value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    const bool number = error == std::errc() && stop == end && std::isfinite(value);
    return number && accepts(value) ? std::string() : fmt::format("{} is not {}", text, wanted);
  };
  return CLI::Validator(check, "");
}

}  // namespace

CLI::Validator number_between(double least, double most) {
  return finite_number([least, most](double x) { return x >= least && x <= most; },
                       fmt::format("a number between {} and {}", least, most));
}

CLI::Validator positive_number() {
  return finite_number([](double x) { return x > 0; }, "a number above 0");
}

CLI::Validator number_of_at_least_0() {
  return finite_number([](double x) { return x >= 0; }, "a number of at least 0");
}

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
