#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "text/jinja/ast.h"

namespace nibble::jinja {

/// A template as a tree of statements; immutable, so several threads may render it.
///
/// parse_template reads one. Tags: if, for, set, macro, call, filter, with, break,
/// continue, raw, generation. Errors: kInvalidArgument with the line for anything else, and for
/// nesting that is too deep.
struct ParsedTemplate {
  Block body;
};
Result<ParsedTemplate> parse_template(std::string_view source);

}  // namespace nibble::jinja
