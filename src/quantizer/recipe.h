#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/plan.h"

namespace nibble {

inline constexpr std::string_view kRecipeName = "quantization_recipe.json";

/// How an output was made, its rules all in one list, those of the file as well, so that another
/// one can be made alike:
///   {"nibble_recipe": 1, "scheme", "scale_rule", "format", "lm_head", "others": "keep" | "bf16",
///    "rules": [], "ignore": [], "include": [], "calibration": {...} or null}
/// and "budget": {...} where the rules were chosen for one.
/// Errors: those of read_rules_file().
Result<Json> recipe_of(const PlanOptions& options);

/// Writes it into a folder, flushed.
Status write_recipe(const Json& recipe, const std::string& folder);

/// The options of a recipe file. kCorrupt naming file and field; the errors of find_scheme(),
/// parse_scale_rule() and parse_dialect().
Result<PlanOptions> read_recipe(const std::string& path);

}  // namespace nibble
