#pragma once

#include <string_view>

#include "base/status.h"

namespace nibble {

/// Bounds what a client's grammar in EBNF may cost: 64 KiB, at most 1000 repetitions within one
/// pair of braces and 2000 in all of them multiplied, kMostGrammarCost with repetitions written
/// out, no macros, no options of rules. Errors: kInvalidArgument with the byte. It does not check
/// the syntax: GrammarCompiler does.
[[nodiscard]] Status check_ebnf(std::string_view text);

}  // namespace nibble
