#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "text/grammar/schema_writer.h"

namespace nibble {
namespace {

constexpr int kMostDecimals = 6;
// Below it a double tells numbers with six decimals apart, so what holds for the text holds for the
// number that a reader makes of it.
constexpr double kMostFractional = 1e9;
constexpr double kMostBound = 0x1p52;  // so that its neighbours are whole numbers, too
constexpr int64_t kMostMultiples = 1024;

/// Numbers that a schema allows, as far as its bounds say.
struct Bounds {
  std::optional<double> low, high;
  bool low_open = false, high_open = false;  // the bound itself is not allowed

  [[nodiscard]] bool any() const { return low || high; }
};

Result<std::optional<double>> bound(const SchemaPlace& place, std::string_view key) {
  const Json* value = place.find(key);
  if (value == nullptr) {
    return std::optional<double>();
  }
  const std::string pointer = place.pointer + "/" + std::string(key);
  if (!value->is_number()) {
    return schema_error(pointer, "expected a number");
  }
  const double number = value->as_double();
  if (!(std::abs(number) <= kMostBound)) {
    return schema_error(pointer, "bounds above 2^52 are not enforced");
  }
  return std::optional(number);
}

Result<Bounds> read_bounds(const SchemaPlace& place) {
  NIBBLE_ASSIGN_OR_RETURN(const auto minimum, bound(place, "minimum"));
  NIBBLE_ASSIGN_OR_RETURN(const auto maximum, bound(place, "maximum"));
  NIBBLE_ASSIGN_OR_RETURN(const auto above, bound(place, "exclusiveMinimum"));
  NIBBLE_ASSIGN_OR_RETURN(const auto below, bound(place, "exclusiveMaximum"));
  Bounds out{.low = minimum, .high = maximum};
  if (above && (!minimum || *above >= *minimum)) {
    out.low = above;
    out.low_open = true;
  }
  if (below && (!maximum || *below <= *maximum)) {
    out.high = below;
    out.high_open = true;
  }
  return out;
}

/// The range of whole numbers i for which i / 10^decimals is within the bounds.
struct WholeRange {
  std::optional<int64_t> low, high;
};

/// A reader makes the double next to i / scale of such a number's text, which is i / scale.
WholeRange scaled_range(const Bounds& bounds, int decimals) {
  const double scale = std::pow(10.0, decimals);
  WholeRange out;
  if (bounds.low) {
    auto i = static_cast<int64_t>(std::floor(*bounds.low * scale)) - 1;
    const auto below = [&](double value) {
      return value < *bounds.low || (bounds.low_open && value == *bounds.low);
    };
    while (below(static_cast<double>(i) / scale)) {
      ++i;
    }
    out.low = i;
  }
  if (bounds.high) {
    auto i = static_cast<int64_t>(std::ceil(*bounds.high * scale)) + 1;
    const auto above = [&](double value) {
      return value > *bounds.high || (bounds.high_open && value == *bounds.high);
    };
    while (above(static_cast<double>(i) / scale)) {
      --i;
    }
    out.high = i;
  }
  return out;
}

/// Digits as classes, one after another: "1[0-4][0-9]".
struct DigitRun {
  std::vector<std::pair<char, char>> digits;
  bool more = false;  // any further digits follow the first one
};

/// All numbers of `low`'s digits from low to high, which have as many digits.
void add_equal_length(const std::string& low, const std::string& high, std::vector<DigitRun>& out) {
  const auto run = [&](std::string_view prefix, char from, char to) {
    if (from > to) {
      return;
    }
    DigitRun one;
    for (const char c : prefix) {
      one.digits.emplace_back(c, c);
    }
    one.digits.emplace_back(from, to);
    one.digits.resize(low.size(), {'0', '9'});
    out.push_back(std::move(one));
  };
  const auto differ = static_cast<size_t>(std::ranges::mismatch(low, high).in1 - low.begin());
  if (differ == low.size()) {
    run(std::string_view(low).substr(0, low.size() - 1), low.back(), low.back());
    return;
  }
  run(std::string_view(low).substr(0, differ), static_cast<char>(low[differ] + 1),
      static_cast<char>(high[differ] - 1));
  for (size_t i = differ + 1; i < low.size(); ++i) {
    run(std::string_view(low).substr(0, i), static_cast<char>(low[i] + 1), '9');
    run(std::string_view(high).substr(0, i), '0', static_cast<char>(high[i] - 1));
  }
  run(std::string_view(low).substr(0, low.size() - 1), low.back(), low.back());
  run(std::string_view(high).substr(0, high.size() - 1), high.back(), high.back());
}

/// Whole numbers from low, not negative, to high, with at least `width` digits.
std::vector<DigitRun> whole_numbers(int64_t low, std::optional<int64_t> high, size_t width) {
  std::vector<DigitRun> out;
  const auto text = [&](int64_t value) {
    std::string digits = std::to_string(value);
    return digits.size() < width ? std::string(width - digits.size(), '0') + digits : digits;
  };
  std::string from = text(low);
  const std::string last = high ? text(*high) : std::string(from.size(), '9');
  while (from.size() < last.size()) {
    add_equal_length(from, std::string(from.size(), '9'), out);
    from = "1" + std::string(from.size(), '0');
  }
  add_equal_length(from, last, out);
  if (!high) {
    DigitRun longer{.more = true};
    longer.digits.emplace_back('1', '9');
    longer.digits.resize(last.size() + 1, {'0', '9'});
    out.push_back(std::move(longer));
  }
  return out;
}

std::string run_body(const DigitRun& run, bool negative, int decimals) {
  std::string out = negative ? "\"-\"" : "";
  for (size_t i = 0; i < run.digits.size(); ++i) {
    if (decimals > 0 && i + static_cast<size_t>(decimals) == run.digits.size()) {
      out += " \".\"";
    }
    const auto [from, to] = run.digits[i];
    out += from == to ? fmt::format(" \"{}\"", from) : fmt::format(" [{}-{}]", from, to);
    out += i == 0 && run.more ? " [0-9]{0,12}" : "";
  }
  return out;
}

/// Alternatives for the numbers of a range with exactly so many decimals.
void add_range(const WholeRange& range, int decimals, std::vector<std::string>& out) {
  const auto width = static_cast<size_t>(decimals) + 1;
  if (range.low && range.high && *range.low > *range.high) {
    return;
  }
  if (!range.high || *range.high >= 0) {
    const int64_t low = std::max<int64_t>(range.low.value_or(0), 0);
    for (const DigitRun& run : whole_numbers(low, range.high, width)) {
      out.push_back(run_body(run, false, decimals));
    }
  }
  if (!range.low || *range.low < 0) {
    const int64_t low = std::max<int64_t>(1, -range.high.value_or(-1));
    std::optional<int64_t> high;
    if (range.low) {
      high = -*range.low;
    }
    for (const DigitRun& run : whole_numbers(low, high, width)) {
      out.push_back(run_body(run, true, decimals));
    }
  }
}

Result<std::string> joined(const std::vector<std::string>& parts, const SchemaPlace& place) {
  if (parts.empty()) {
    return schema_error(place.pointer, "the bounds allow no number");
  }
  return fmt::format("{}", fmt::join(parts, " | "));
}

Result<std::string> multiples(const SchemaPlace& place, const WholeRange& range, int64_t step) {
  const std::string pointer = place.pointer + "/multipleOf";
  if (!range.low || !range.high) {
    return schema_error(pointer, "it is enforced between a minimum and a maximum alone");
  }
  if ((*range.high - *range.low) / step >= kMostMultiples) {
    return schema_error(pointer, fmt::format("more than {} numbers", kMostMultiples));
  }
  std::vector<std::string> out;
  const int64_t before = *range.low - ((*range.low % step) + step) % step;
  for (int64_t value = before; value <= *range.high; value += step) {
    if (value >= *range.low) {
      out.push_back(fmt::format("\"{}\"", value));
    }
  }
  return joined(out, place);
}

/// The member multipleOf where it is a whole number; 1 without it.
Result<int64_t> whole_step(const SchemaPlace& place) {
  const Json* step = place.find("multipleOf");
  if (step == nullptr) {
    return int64_t{1};
  }
  const bool number = step->is_number();
  if (!number || !(step->as_double() > 0)) {
    return schema_error(place.pointer + "/multipleOf", "expected a number above 0");
  }
  if (std::trunc(step->as_double()) != step->as_double() || step->as_double() > kMostBound) {
    return schema_error(place.pointer + "/multipleOf", "only whole numbers are enforced");
  }
  return static_cast<int64_t>(step->as_double());
}

}  // namespace

Result<std::string> integer_body(const SchemaPlace& place) {
  NIBBLE_ASSIGN_OR_RETURN(const Bounds bounds, read_bounds(place));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t step, whole_step(place));
  const WholeRange range = scaled_range(bounds, 0);
  if (step != 1) {
    return multiples(place, range, step);
  }
  if (!bounds.any()) {
    return std::string("json_integer");
  }
  std::vector<std::string> out;
  add_range(range, 0, out);
  return joined(out, place);
}

Result<std::string> number_body(const SchemaPlace& place) {
  if (place.find("multipleOf") != nullptr) {
    return integer_body(place);  // multiples of whole numbers are whole
  }
  NIBBLE_ASSIGN_OR_RETURN(const Bounds bounds, read_bounds(place));
  if (!bounds.any()) {
    return std::string("json_number");
  }
  const bool small = std::abs(bounds.low.value_or(0)) <= kMostFractional &&
                     std::abs(bounds.high.value_or(0)) <= kMostFractional;
  std::vector<std::string> out;
  for (int decimals = 0; decimals <= (small ? kMostDecimals : 0); ++decimals) {
    add_range(scaled_range(bounds, decimals), decimals, out);
  }
  return joined(out, place);
}

}  // namespace nibble
