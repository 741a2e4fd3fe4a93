#include "server/ignored_fields.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace nibble {
namespace {

struct Row {
  std::string_view name;
  std::array<std::string_view, 2> harmless = {};  // values, as JSON, that ask for nothing else
};

constexpr std::array kRows = {
    Row{"user"},
    Row{"safety_identifier"},
    Row{"metadata", {"{}"}},
    Row{"store", {"false"}},
    Row{"service_tier", {"\"auto\"", "\"default\""}},
    Row{"request_id"},
    Row{"session_id"},
    Row{"prompt_cache_key"},
    Row{"prediction"},
    Row{"verbosity", {"\"medium\""}},
    Row{"spaces_between_special_tokens", {"true"}},
};

}  // namespace

std::string IgnoredFields::warning() const {
  std::string out = "ignored: ";
  out += fmt::format("{}", fmt::join(known, ", "));
  if (unknown > 0) {
    out += fmt::format("{}{} unknown field{}", known.empty() ? "" : "; ", unknown,
                       unknown == 1 ? "" : "s");
  }
  return out;
}

void read_ignored(FieldReader& fields, Strictness strictness, IgnoredFields& ignored) {
  for (const Row& row : kRows) {
    const Json* value = fields.find(row.name);
    if (value == nullptr || std::ranges::find(row.harmless, value->dump()) != row.harmless.end()) {
      continue;
    }
    if (strictness == Strictness::kStrict) {
      fields.fail(row.name,
                  fmt::format("{0}: this server does nothing with it; remove it, or start "
                              "the server without --strict to have it ignored",
                              row.name));
    }
    ignored.known.push_back(row.name);
  }
}

}  // namespace nibble
