#pragma once

#include <optional>
#include <string>

#include "base/json.h"
#include "base/status.h"
#include "budget_choice.h"
#include "checkpoint/dialect.h"

namespace nibble {

/// What was chosen for a budget, as runs that go on with it, and recipes, know it.
struct KeptChoice {
  Json asked;          // the flags that decided it, by their names
  std::string source;  // source_hash(); empty in a recipe
  BudgetChoice choice;
  Dialect dialect = Dialect::kCompressedTensors;

  /// The member "budget" of a recipe, which has schemes and rules itself.
  [[nodiscard]] Json recipe() const;
};

/// What an earlier run for a destination kept in its work folder; empty: nothing.
/// kCorrupt naming the file.
Result<std::optional<KeptChoice>> read_kept_choice(const std::string& destination);
/// What an output's recipe says; empty where nothing was chosen for it.
Result<std::optional<KeptChoice>> read_recipe_choice(const std::string& output);
/// Keeps it in the work folder, alone: what else is there is removed.
Status keep_choice(const KeptChoice& kept, const std::string& destination);

}  // namespace nibble
