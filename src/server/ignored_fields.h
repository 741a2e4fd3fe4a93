#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/field_reader.h"
#include "server/http.h"

namespace nibble {

/// kStrict refuses fields that are not honoured.
enum class Strictness { kLenient, kStrict };

/// The header of an answer that names the fields of its request which had no effect.
inline constexpr std::string_view kWarningHeader = "X-Nibble-Warning";

/// Fields of a request that had no effect.
struct IgnoredFields {
  std::vector<std::string_view> known;  // by names of the program, not of the client
  int64_t unknown = 0;                  // so many that nobody knows

  [[nodiscard]] bool empty() const { return known.empty() && unknown == 0; }
  /// Adds a field, once.
  void add(std::string_view name);
  /// "ignored: user, store; 2 unknown fields": the header's value.
  [[nodiscard]] std::string warning() const;
};

/// A field that a route knows, but does nothing with.
struct IgnoredRow {
  std::string_view name;
  std::array<std::string_view, 2> harmless = {};  // values, as JSON, that ask for nothing else
};

/// Finds fields that do not change anything here, unless their value asks for what happens anyway
/// ("store": false). kStrict refuses them.
void read_ignored(FieldReader& fields,
                  std::span<const IgnoredRow> rows,
                  Strictness strictness,
                  IgnoredFields& ignored);
/// The same for a field that the caller found.
void ignore_field(FieldReader& fields,
                  std::string_view name,
                  Strictness strictness,
                  IgnoredFields& ignored);
/// Of chats and completions.
[[nodiscard]] std::span<const IgnoredRow> ignored_by_generation();

/// kWarningHeader where there is something to say.
[[nodiscard]] HttpHeaders warning_headers(const IgnoredFields& ignored);

}  // namespace nibble
