#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "arch/family.h"
#include "base/json.h"
#include "base/status.h"
#include "quant/scheme.h"
#include "quantizer/module_kind.h"
#include "quantizer/module_pattern.h"

namespace nibble {

/// What becomes of matrices that the ready-made rules do not select but that the source stores
/// quantized.
enum class OtherMatrices : uint8_t { kKeep, kDecode };

/// What decides which matrices are quantized, and how.
struct RuleOptions {
  QuantScheme scheme;                // of all that the model's own rules select
  std::vector<std::string> rules;    // "PATTERN=SCHEME" or "PATTERN=keep": the first match decides
  std::string rules_file;            // more of them, one a line, after `rules`; # begins a comment
  std::vector<std::string> ignore;   // patterns of modules to leave as they are
  std::vector<std::string> include;  // patterns of modules to quantize whatever they are
  std::optional<QuantScheme> head;   // of the output head, before all rules
  OtherMatrices others = OtherMatrices::kKeep;
};

/// What becomes of one matrix, and why.
struct Decision {
  std::optional<QuantScheme> scheme;  // empty: passes byte for byte
  std::string rule;                   // "--rule *.q_proj=keep", "kimi_k2: routed experts only"
  bool included = false;              // named by --include
};

/// The rules of one run, in this order: --lm-head, --rule, --rules, --ignore and --include, the
/// ready-made rules of the model. Remembers which patterns were of use.
class RuleSet final {
 public:
  /// config: parsed config.json; decides which ready-made rules apply. kInvalidArgument for a rule
  /// that is malformed or names no scheme; kNotFound for the file.
  static Result<RuleSet> create(const RuleOptions& options, const Json& config);

  /// kInvalidArgument when --ignore names the module and --include or --lm-head does too.
  Result<Decision> decide(std::string_view module);
  /// kInvalidArgument for a pattern that matched no module.
  [[nodiscard]] Status check_all_used() const;
  /// By the names of the model's family; of a family that is not known, by the words in a name.
  [[nodiscard]] ModuleKind kind(std::string_view module) const;
  /// Name of the ready-made rules: "kimi_k2", "default".
  [[nodiscard]] const std::string& family() const { return name_; }

 private:
  struct Rule {
    std::string origin;  // for messages and plans: the flag or "FILE:LINE", with its text
    ModulePattern pattern;
    std::optional<QuantScheme> scheme;
    bool used = false;
  };

  RuleSet() = default;
  Status add_rule(std::string_view text, const std::string& origin);
  Status add_rules_file(const std::string& path);
  Status add_patterns(std::string_view flag,
                      const std::vector<std::string>& texts,
                      std::vector<Rule>& rules);
  static Result<const Rule*> first_match(std::vector<Rule>& rules, std::string_view module);
  [[nodiscard]] Decision model_decision(std::string_view module) const;

  std::vector<Rule> rules_;
  std::vector<Rule> ignore_;
  std::vector<Rule> include_;
  QuantScheme scheme_;
  std::optional<QuantScheme> others_;
  std::optional<QuantScheme> head_;
  const Family* family_ = nullptr;  // nullptr: not known
  std::string name_;                // of the ready-made rules
  bool experts_only_ = false;
  int64_t hidden_layers_ = 0;
};

/// The lines of a file of rules with their numbers, but for comments and empty ones.
struct RuleLine {
  int number = 0;
  std::string text;
};
Result<std::vector<RuleLine>> read_rules_file(const std::string& path);

/// Whether the default rules quantize a matrix of this module: all linear layers but routers,
/// norms, embeddings and heads.
[[nodiscard]] bool quantizable_by_default(std::string_view module);

}  // namespace nibble
