#include "quantizer/rules.h"

#include <algorithm>
#include <utility>

#include "base/file.h"

namespace nibble {
namespace {

constexpr std::string_view kKeep = "keep";

const Json& text_config(const Json& config) {
  const Json* nested = config.find("text_config");
  return nested != nullptr && nested->is_object() ? *nested : config;
}

int64_t hidden_layers(const Json& config) {
  const Json* layers = text_config(config).find("num_hidden_layers");
  return layers != nullptr && layers->is_int() ? layers->as_int() : 0;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t begin = text.find_first_not_of(kBlank);
  return begin == std::string_view::npos
             ? std::string_view()
             : text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

}  // namespace

Result<RuleSet> RuleSet::create(const RuleOptions& options, const Json& config) {
  RuleSet set;
  set.scheme_ = options.scheme;
  set.head_ = options.head;
  if (options.others == OtherMatrices::kDecode) {
    NIBBLE_ASSIGN_OR_RETURN(set.others_, find_scheme("bf16"));
  }
  set.hidden_layers_ = hidden_layers(config);
  for (const std::string& text : options.rules) {
    NIBBLE_RETURN_IF_ERROR(set.add_rule(text, "--rule " + text));
  }
  if (!options.rules_file.empty()) {
    NIBBLE_RETURN_IF_ERROR(set.add_rules_file(options.rules_file));
  }
  NIBBLE_RETURN_IF_ERROR(set.add_patterns("--ignore", options.ignore, set.ignore_));
  NIBBLE_RETURN_IF_ERROR(set.add_patterns("--include", options.include, set.include_));
  set.family_ = guess_family(config);
  const bool fp8 = options.scheme.weight.code == WeightCode::kFp8E4M3;
  const WorthQuantizing worth =
      set.family_ == nullptr ? WorthQuantizing::kLinearLayers : set.family_->worth;
  set.name_ = worth == WorthQuantizing::kLinearLayers ? "default" : set.family_->name;
  set.experts_only_ = worth == WorthQuantizing::kRoutedExperts ||
                      (worth == WorthQuantizing::kRoutedExpertsUnlessFp8 && !fp8);
  return set;
}

Status RuleSet::add_rule(std::string_view text, const std::string& origin) {
  const size_t equals = text.find_last_of('=');  // an expression may hold one
  if (equals == std::string_view::npos) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: not of the form PATTERN=SCHEME or PATTERN=keep", origin);
  }
  auto pattern = ModulePattern::parse(trimmed(text.substr(0, equals)));
  NIBBLE_RETURN_IF_ERROR(pattern.status().with_context(origin));
  const std::string_view name = trimmed(text.substr(equals + 1));
  std::optional<QuantScheme> scheme;
  if (name != kKeep) {
    const auto found = find_scheme(name);
    NIBBLE_RETURN_IF_ERROR(found.status().with_context(origin));
    scheme = *found;
  }
  rules_.push_back({origin, std::move(*pattern), scheme});
  return {};
}

Status RuleSet::add_rules_file(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<RuleLine> lines, read_rules_file(path));
  for (const auto& [number, text] : lines) {
    NIBBLE_RETURN_IF_ERROR(
        add_rule(text, fmt::format("--rules {}:{}: {}", file_name(path), number, text)));
  }
  return {};
}

Status RuleSet::add_patterns(std::string_view flag,
                             const std::vector<std::string>& texts,
                             std::vector<Rule>& rules) {
  for (const std::string& text : texts) {
    const std::string origin = fmt::format("{} {}", flag, text);
    auto pattern = ModulePattern::parse(text);
    NIBBLE_RETURN_IF_ERROR(pattern.status().with_context(origin));
    rules.push_back({origin, std::move(*pattern), std::nullopt});
  }
  return {};
}

Result<const RuleSet::Rule*> RuleSet::first_match(std::vector<Rule>& rules,
                                                  std::string_view module) {
  const Rule* first = nullptr;
  for (Rule& rule : rules) {
    const auto match = rule.pattern.matches(module);
    NIBBLE_RETURN_IF_ERROR(match.status().with_context(rule.origin));
    if (*match) {
      rule.used = true;
      first = first == nullptr ? &rule : first;
    }
  }
  return first;
}

Result<Decision> RuleSet::decide(std::string_view module) {
  NIBBLE_ASSIGN_OR_RETURN(const Rule* rule, first_match(rules_, module));
  NIBBLE_ASSIGN_OR_RETURN(const Rule* ignored, first_match(ignore_, module));
  NIBBLE_ASSIGN_OR_RETURN(const Rule* included, first_match(include_, module));
  if (ignored != nullptr && included != nullptr) {
    return make_error(StatusCode::kInvalidArgument, "module {} is both ignored and included",
                      module);
  }
  if (head_ && kind(module) == ModuleKind::kHead) {
    if (ignored != nullptr) {
      return make_error(StatusCode::kInvalidArgument,
                        "{} names {}, to which --lm-head gives scheme {}; leave one of them out",
                        ignored->origin, module, head_->name);
    }
    return Decision{head_, fmt::format("--lm-head {}", head_->name), true};
  }
  const bool named = included != nullptr;
  if (rule != nullptr) {
    return Decision{rule->scheme, rule->origin, named};
  }
  if (ignored != nullptr) {
    return Decision{std::nullopt, ignored->origin, false};
  }
  if (included != nullptr) {
    return Decision{scheme_, included->origin, true};
  }
  return model_decision(module);
}

Decision RuleSet::model_decision(std::string_view module) const {
  if (!scheme_.weight.quantized()) {
    return {scheme_, fmt::format("{}: whatever is quantized", scheme_.name)};
  }
  const ModuleKind kind = this->kind(module);
  if (kind == ModuleKind::kRoutedExpert) {
    return {scheme_, name_ + ": routed experts"};
  }
  if (experts_only_) {
    return {others_, name_ + ": routed experts only"};
  }
  if (kind == ModuleKind::kLinear) {
    return {scheme_, name_ + ": linear layers"};
  }
  return {others_, fmt::format("{}: {} stays", name_, kind_name(kind))};
}

ModuleKind RuleSet::kind(std::string_view module) const {
  const std::optional<Role> role = family_ == nullptr ? std::nullopt : role_of(*family_, module);
  return role ? kind_of(*role) : module_kind(module, hidden_layers_);
}

Status RuleSet::check_all_used() const {
  for (const std::vector<Rule>* rules : {&rules_, &ignore_, &include_}) {
    for (const Rule& rule : *rules) {
      if (!rule.used) {
        return make_error(StatusCode::kInvalidArgument,
                          "{}: matches no module; give a module's full name, a pattern with *, or "
                          "\"re:PATTERN\"",
                          rule.origin);
      }
    }
  }
  return {};
}

Result<std::vector<RuleLine>> read_rules_file(const std::string& path) {
  auto text = read_file(path);
  NIBBLE_RETURN_IF_ERROR(text.status().with_context("--rules"));
  const std::string_view all = *text;
  std::vector<RuleLine> lines;
  int number = 1;
  for (size_t at = 0; at < all.size(); ++number) {
    const size_t end = std::min(all.find('\n', at), all.size());
    const std::string_view line = trimmed(all.substr(at, end - at));
    at = end + 1;
    if (!line.empty() && line.front() != '#') {
      lines.push_back({number, std::string(line)});
    }
  }
  return lines;
}

bool quantizable_by_default(std::string_view module) {
  const ModuleKind kind = module_kind(module, 0);
  return kind == ModuleKind::kLinear || kind == ModuleKind::kRoutedExpert;
}

}  // namespace nibble
