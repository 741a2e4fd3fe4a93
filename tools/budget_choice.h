#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "quantizer/plan.h"
#include "sensitivity.h"

namespace nibble {

/// What an output may take up: one of the two.
struct Budget {
  double bits = 0;    // per weight of the candidates, scales and zero points included
  int64_t bytes = 0;  // of the weight files
};

/// "4.5bpw", or a size like "6GiB". kInvalidArgument, naming --budget.
Result<Budget> parse_budget(const std::string& text);

/// A scheme for every candidate.
struct BudgetChoice {
  std::vector<size_t> chosen;      // by item of the Sensitivity, its scheme
  double loss = 0;                 // predicted: sum of the items' losses
  double bound = 0;                // no choice within the budget is predicted to lose less
  double bits = 0;                 // per weight of the candidates
  int64_t bytes = 0;               // of the weight files
  std::vector<std::string> rules;  // "PATTERN=SCHEME", one for each item
  std::string main_scheme;         // of most weights; empty: everything is kept
  int64_t measured_tokens = 0;     // that losses in nats were measured over; 0: they are errors
};

/// Chooses schemes whose predicted loss is least within a budget; candidates that are tied get one.
///   beside  what else the output's plan says: the head's scheme takes part in its bytes
/// kInvalidArgument where not even the smallest fit, saying what they take.
Result<BudgetChoice> choose_schemes(const Sensitivity& known,
                                    const Budget& budget,
                                    const PlanOptions& beside = {});

/// Two lines: what was chosen of which scheme, and the predicted loss beside its bound.
std::string choice_text(const BudgetChoice& choice, const std::string& budget);

}  // namespace nibble
