#include "chat_settings.h"

#include <charconv>
#include <cmath>
#include <limits>

namespace nibble {
namespace {

constexpr double kHuge = std::numeric_limits<double>::max();

struct Limits {
  double low = 0;
  double high = kHuge;
};

/// Reads `text` into `slot`, whatever its type of number.
template <typename T>
Status read_number(std::string_view name,
                   std::string_view text,
                   const Limits& limits,
                   std::optional<T>& slot) {
  if (text == "default") {
    slot.reset();
    return {};
  }
  T value{};
  const char* end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, value);
  const auto number = static_cast<double>(value);
  if (error != std::errc() || read != end || !(number >= limits.low) || number > limits.high) {
    return make_error(StatusCode::kInvalidArgument, "/set {} {}: must be a {}number {} {}{}", name,
                      text, std::is_integral_v<T> ? "whole " : "", "from", limits.low,
                      limits.high == kHuge ? "" : fmt::format(" to {}", limits.high));
  }
  slot = value;
  return {};
}

template <typename T>
std::string shown(const std::optional<T>& value) {
  return value ? fmt::format("{}", *value) : std::string("default");
}

}  // namespace

Status set_answer_flag(AnswerFlags& flags, std::string_view name, const std::string& value) {
  if (name == "temperature") {
    return read_number(name, value, {.high = 100}, flags.temperature);
  }
  if (name == "top_p") {
    return read_number(name, value, {.high = 1}, flags.top_p);
  }
  if (name == "top_k") {
    return read_number(name, value, {}, flags.top_k);
  }
  if (name == "min_p") {
    return read_number(name, value, {.high = 1}, flags.min_p);
  }
  if (name == "repetition_penalty") {
    return read_number(name, value, {.low = 0.01, .high = 100}, flags.repetition_penalty);
  }
  if (name == "seed") {
    return read_number(name, value, {}, flags.seed);
  }
  if (name == "max_tokens") {
    std::optional<int64_t> most;
    NIBBLE_RETURN_IF_ERROR(read_number(name, value, {.low = 1, .high = 1 << 24}, most));
    flags.max_tokens = most.value_or(flags.max_tokens);
    return {};
  }
  return make_error(StatusCode::kInvalidArgument,
                    "there is no setting {}; there are max_tokens, temperature, top_p, top_k, "
                    "min_p, repetition_penalty and seed",
                    name);
}

std::string answer_flags_text(const AnswerFlags& flags) {
  return fmt::format(
      "max_tokens {}\ntemperature {}\ntop_p {}\ntop_k {}\nmin_p {}\nrepetition_penalty {}\nseed "
      "{}\n",
      flags.max_tokens, shown(flags.temperature), shown(flags.top_p), shown(flags.top_k),
      shown(flags.min_p), shown(flags.repetition_penalty), shown(flags.seed));
}

}  // namespace nibble
