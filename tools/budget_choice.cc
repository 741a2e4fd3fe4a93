#include "budget_choice.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "quantizer/budget/knapsack.h"
#include "quantizer/plan.h"

namespace nibble {
namespace {

constexpr int kMostPlans = 8;  // the header's length follows the choice; two are enough as a rule

class Chooser final {
 public:
  Chooser(const Sensitivity& known, const Budget& budget, const PlanOptions& beside)
      : known_(known), budget_(budget), beside_(beside) {
    for (size_t i = 0; i < known.items.size(); ++i) {
      weights_ += known.items[i].candidate.weights();
      ties_[known.items[i].candidate.tied].push_back(i);
    }
  }

  Result<BudgetChoice> run() {
    NIBBLE_RETURN_IF_ERROR(make_units());
    NIBBLE_RETURN_IF_ERROR(count_others());
    int64_t capacity = budget_.bytes - others_;
    if (budget_.bits > 0) {
      capacity = static_cast<int64_t>(budget_.bits * static_cast<double>(weights_) + 1e-3);
    }
    for (int plan = 0;; ++plan) {
      NIBBLE_RETURN_IF_ERROR(solve(capacity));
      NIBBLE_RETURN_IF_ERROR(count_bytes());
      const int64_t over = out_.bytes - budget_.bytes;
      if (budget_.bits > 0 || over <= 0) {
        break;
      }
      if (plan == kMostPlans) {
        return too_small(fmt::format("{} bytes", out_.bytes));
      }
      capacity -= over;
    }
    out_.measured_tokens = known_.measured_tokens;
    return std::move(out_);
  }

 private:
  Status make_units() {
    for (const auto& [tie, items] : ties_) {
      std::vector<KnapsackChoice> unit;
      std::vector<size_t> schemes;
      for (size_t scheme = 0; scheme < known_.schemes.size(); ++scheme) {
        KnapsackChoice choice;
        bool fits = true;
        for (const size_t index : items) {
          const SensitivityItem& item = known_.items[index];
          fits = fits && item.sizes[scheme].has_value();
          if (fits) {
            choice.size += budget_.bits > 0 ? std::llround(item.sizes[scheme]->bits)
                                            : item.sizes[scheme]->bytes;
            choice.loss += item.loss(scheme);
          }
        }
        if (fits) {
          unit.push_back(choice);
          schemes.push_back(scheme);
        }
      }
      if (unit.empty()) {
        return make_error(StatusCode::kUnsupported,
                          "--schemes: {} must be stored alike, but none of the schemes fits all of "
                          "them; add {}",
                          tie, "keep");
      }
      units_.push_back(std::move(unit));
      schemes_.push_back(std::move(schemes));
    }
    return {};
  }

  /// Bytes of what is no candidate.
  Status count_others() {
    others_ = known_.reader->total_bytes();
    const SchemeChoice keep;
    if (beside_.rules.head) {
      std::vector<std::string> rules;
      for (const SensitivityItem& item : known_.items) {
        rules.push_back(item.candidate.name + "=keep");
      }
      NIBBLE_ASSIGN_OR_RETURN(others_, planned_bytes(*beside_.rules.head, std::move(rules)));
    }
    for (const SensitivityItem& item : known_.items) {
      const auto kept = stored_size(item.candidate, keep, known_.dialect);
      others_ -= kept.ok() ? kept->bytes : 0;
    }
    return {};
  }

  Status solve(int64_t capacity) {
    const auto found = solve_knapsack(units_, capacity);
    if (!found.ok()) {
      return too_small(least());
    }
    out_.loss = found->loss;
    out_.bound = found->bound;
    out_.chosen.assign(known_.items.size(), 0);
    out_.bits = 0;
    size_t unit = 0;
    for (const auto& [tie, items] : ties_) {
      const size_t scheme = schemes_[unit][found->chosen[unit]];
      ++unit;
      for (const size_t index : items) {
        out_.chosen[index] = scheme;
        out_.bits += known_.items[index].sizes[scheme]->bits / static_cast<double>(weights_);
      }
    }
    write_rules();
    return {};
  }

  /// In the order of the model.
  void write_rules() {
    std::map<std::string, int64_t> weights;
    out_.rules.clear();
    for (const Candidate& candidate : in_order()) {
      const auto item = std::ranges::find_if(known_.items, [&](const SensitivityItem& one) {
        return one.candidate.name == candidate.name;
      });
      const auto index = static_cast<size_t>(item - known_.items.begin());
      const SchemeChoice& choice = known_.schemes[out_.chosen[index]];
      out_.rules.push_back(fmt::format("{}={}", candidate.name, choice.name));
      if (choice.scheme) {
        weights[choice.name] += candidate.weights();
      }
    }
    const auto most = std::ranges::max_element(
        weights, [](const auto& a, const auto& b) { return a.second < b.second; });
    out_.main_scheme = most == weights.end() ? std::string() : most->first;
  }

  [[nodiscard]] std::vector<Candidate> in_order() const {
    return list_candidates(known_.source, known_.config, known_.schemes).value();
  }

  Status count_bytes() {
    if (out_.main_scheme.empty()) {  // all is kept
      out_.bytes = known_.reader->total_bytes();
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(const QuantScheme scheme, find_scheme(out_.main_scheme));
    NIBBLE_ASSIGN_OR_RETURN(out_.bytes, planned_bytes(scheme, out_.rules));
    return {};
  }

  [[nodiscard]] Result<int64_t> planned_bytes(const QuantScheme& scheme,
                                              std::vector<std::string> rules) const {
    PlanOptions options = beside_;
    options.rules.scheme = scheme;
    options.rules.rules = std::move(rules);
    options.dialect = known_.dialect;
    NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan,
                            make_plan(*known_.reader, known_.config, options));
    return plan.bytes_out;
  }

  [[nodiscard]] std::string least() const {
    int64_t sum = 0;
    for (const std::vector<KnapsackChoice>& unit : units_) {
      sum += std::ranges::min(unit, {}, &KnapsackChoice::size).size;
    }
    return budget_.bits > 0
               ? fmt::format("{:.3f}bpw", static_cast<double>(sum) / static_cast<double>(weights_))
               : fmt::format("{} bytes", sum + others_);
  }

  static Status too_small(const std::string& least) {
    return make_error(StatusCode::kInvalidArgument,
                      "--budget: the smallest of the schemes take {}; give more, or add a smaller "
                      "scheme to --schemes",
                      least);
  }

  const Sensitivity& known_;
  Budget budget_;
  const PlanOptions& beside_;
  int64_t weights_ = 0;
  int64_t others_ = 0;                               // bytes of what is no candidate
  std::map<std::string, std::vector<size_t>> ties_;  // items by what ties them
  std::vector<std::vector<KnapsackChoice>> units_;   // in the order of ties_
  std::vector<std::vector<size_t>> schemes_;         // of their choices
  BudgetChoice out_;
};

}  // namespace

Result<Budget> parse_budget(const std::string& text) {
  constexpr std::string_view kUnits = "kmgt";
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  std::string unit(stop, end);
  std::ranges::transform(unit, unit.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  if (error == std::errc() && std::isfinite(number) && number > 0) {
    if (unit == "bpw") {
      return Budget{.bits = number, .bytes = 0};
    }
    const size_t power = unit.empty() ? std::string_view::npos : kUnits.find(unit.front());
    const std::string_view rest =
        std::string_view(unit).substr(power == std::string_view::npos ? 0 : 1);
    const double bytes = std::ldexp(
        number, power == std::string_view::npos ? 0 : 10 * (static_cast<int>(power) + 1));
    if ((rest.empty() || rest == "b" || rest == "ib") && bytes >= 1 && bytes < 0x1p62) {
      return Budget{.bits = 0, .bytes = static_cast<int64_t>(bytes)};
    }
  }
  return make_error(StatusCode::kInvalidArgument,
                    "--budget {}: neither bits per weight, like 4.5bpw, nor a size, like 6GiB",
                    text);
}

Result<BudgetChoice> choose_schemes(const Sensitivity& known,
                                    const Budget& budget,
                                    const PlanOptions& beside) {
  return Chooser(known, budget, beside).run();
}

std::string choice_text(const BudgetChoice& choice, const std::string& budget) {
  std::map<std::string, int64_t> counts;
  for (const std::string& rule : choice.rules) {
    ++counts[rule.substr(rule.find_last_of('=') + 1)];
  }
  std::string schemes;
  for (const auto& [name, count] : counts) {
    schemes += fmt::format("{}{} {}", schemes.empty() ? "" : ", ", count, name);
  }
  const std::string unit = choice.measured_tokens > 0 ? " nats" : "";
  return fmt::format(
      "budget {}: {:.3f} bits per weight, {:.2f} MB in all; {}\n"
      "predicted KL divergence {:.6f}{}, {:.2f} % above the bound of {:.6f} that no choice within "
      "the budget goes below\n",
      budget, choice.bits, static_cast<double>(choice.bytes) / 1e6, schemes, choice.loss, unit,
      choice.bound > 0 ? 100 * (choice.loss / choice.bound - 1) : 0.0, choice.bound);
}

}  // namespace nibble
