#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/field_reader.h"

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
  /// "ignored: user, store; 2 unknown fields": the header's value.
  [[nodiscard]] std::string warning() const;
};

/// Finds fields of other servers that do not change anything here, unless their value asks for what
/// happens anyway ("store": false). kStrict refuses them.
void read_ignored(FieldReader& fields, Strictness strictness, IgnoredFields& ignored);

}  // namespace nibble
