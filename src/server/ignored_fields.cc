#include "server/ignored_fields.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace nibble {
namespace {

constexpr std::array kOfGeneration = {
    IgnoredRow{"user"},
    IgnoredRow{"safety_identifier"},
    IgnoredRow{"metadata", {"{}"}},
    IgnoredRow{"store", {"false"}},
    IgnoredRow{"service_tier", {"\"auto\"", "\"default\""}},
    IgnoredRow{"request_id"},
    IgnoredRow{"session_id"},
    IgnoredRow{"prompt_cache_key"},
    IgnoredRow{"prediction"},
    IgnoredRow{"verbosity", {"\"medium\""}},
    IgnoredRow{"spaces_between_special_tokens", {"true"}},
};

}  // namespace

void IgnoredFields::add(std::string_view name) {
  if (std::ranges::find(known, name) == known.end()) {
    known.push_back(name);
  }
}

std::string IgnoredFields::warning() const {
  std::string out = "ignored: ";
  out += fmt::format("{}", fmt::join(known, ", "));
  if (unknown > 0) {
    out += fmt::format("{}{} unknown field{}", known.empty() ? "" : "; ", unknown,
                       unknown == 1 ? "" : "s");
  }
  return out;
}

void ignore_field(FieldReader& fields,
                  std::string_view name,
                  Strictness strictness,
                  IgnoredFields& ignored) {
  if (strictness == Strictness::kStrict) {
    fields.fail(name, fmt::format("{}: this server does nothing with it; remove it, or start the "
                                  "server without --strict to have it ignored",
                                  name));
  }
  ignored.add(name);
}

void read_ignored(FieldReader& fields,
                  std::span<const IgnoredRow> rows,
                  Strictness strictness,
                  IgnoredFields& ignored) {
  for (const IgnoredRow& row : rows) {
    const Json* value = fields.find(row.name);
    if (value != nullptr && std::ranges::find(row.harmless, value->dump()) == row.harmless.end()) {
      ignore_field(fields, row.name, strictness, ignored);
    }
  }
}

std::span<const IgnoredRow> ignored_by_generation() { return kOfGeneration; }

HttpHeaders warning_headers(const IgnoredFields& ignored) {
  return ignored.empty() ? HttpHeaders()
                         : HttpHeaders{{std::string(kWarningHeader), ignored.warning()}};
}

}  // namespace nibble
