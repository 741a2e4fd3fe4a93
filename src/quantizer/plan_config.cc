#include "quantizer/plan_config.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/quant_config.h"

namespace nibble {
namespace {

constexpr std::string_view kKept = "as the source has it";

bool is_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char c) { return std::isdigit(c) != 0; });
}

// "a.3.b" -> "re:a\.\d+\.b$".
std::string generalized(std::string_view module) {
  std::string pattern = "re:";
  for (size_t at = 0; at <= module.size();) {
    const size_t dot = std::min(module.find('.', at), module.size());
    const std::string_view part = module.substr(at, dot - at);
    pattern += is_number(part) ? std::string_view("\\d+") : part;
    if (dot < module.size()) {
      pattern += "\\.";
    }
    at = dot + 1;
  }
  return pattern + "$";
}

const Json* source_quantization(const Json& config) {
  const Json* found = config.find("quantization_config");
  if (found == nullptr || !found->is_object()) {
    const Json* text = config.find("text_config");
    found = text == nullptr ? nullptr : text->find("quantization_config");
  }
  return found != nullptr && found->is_object() ? found : nullptr;
}

// The dialect that the source's kept matrices can be described in; empty when there is none.
std::optional<Dialect> source_dialect(const Json& config) {
  const Json* quantization = source_quantization(config);
  const Json* method = quantization == nullptr ? nullptr : quantization->find("quant_method");
  if (method == nullptr || !method->is_string()) {
    return std::nullopt;
  }
  const auto dialect = parse_dialect(method->as_string());
  return dialect.ok() && *dialect == Dialect::kCompressedTensors ? std::optional(*dialect)
                                                                 : std::nullopt;
}

/// Collects which modules are stored how.
class ConfigCollector final {
 public:
  explicit ConfigCollector(const Json& source_config) : source_config_(source_config) {}

  Status add(const DecidedMatrix& decided) {
    const std::string& module = decided.matrix->module();
    all_.push_back(module);
    head_seen_ = head_seen_ || last_component(module) == "lm_head";
    if (decided.encoded && decided.decision.scheme->weight.quantized()) {
      use_of(*decided.decision.scheme).push_back(module);
    } else if (!decided.encoded && !is_plain_source(*decided.matrix)) {
      return add_kept(decided);
    } else if (decided.kind != ModuleKind::kEmbedding) {
      stored_.ignore.push_back(module);
    }
    return {};
  }

  Result<Json> finish(std::optional<Dialect> dialect, KvCacheScheme kv_cache) {
    stored_.transforms = source_transforms(source_config_);
    if (uses_.empty() && stored_.transforms.is_null()) {
      return Json();
    }
    NIBBLE_RETURN_IF_ERROR(check_kept(dialect));
    stored_.dialect = dialect.value_or(Dialect::kCompressedTensors);
    stored_.kv_cache = kv_cache;
    if (!head_seen_) {
      stored_.ignore.emplace_back("lm_head");  // tied to the embedding, yet a Linear to loaders
    }
    for (auto& [scheme, modules] : uses_) {
      SchemeUse use{scheme, {}};
      if (uses_.size() > 1) {
        use.modules = module_patterns(modules, others(modules));
      }
      stored_.uses.push_back(std::move(use));
    }
    return stored_config_json(stored_);
  }

 private:
  std::vector<std::string>& use_of(const QuantScheme& scheme) {
    for (auto& [known, modules] : uses_) {
      if (known.weight == scheme.weight && known.act == scheme.act) {
        return modules;
      }
    }
    return uses_.emplace_back(scheme, std::vector<std::string>()).second;
  }

  Status add_kept(const DecidedMatrix& decided) {
    first_kept_ = first_kept_ == nullptr ? &decided : first_kept_;
    if (!source_dialect(source_config_)) {
      return cannot_keep(decided);
    }
    NIBBLE_ASSIGN_OR_RETURN(const QuantConfig config, read_quant_config(source_config_, ""));
    const QuantGroup* group = config.group_for(decided.matrix->module());
    if (group == nullptr) {
      return cannot_keep(decided);
    }
    QuantScheme scheme = scheme_of(*group);
    scheme.name = scheme.name.empty() ? kKept : scheme.name;
    use_of(scheme).push_back(decided.matrix->module());
    return {};
  }

  [[nodiscard]] Status check_kept(std::optional<Dialect> dialect) const {
    const bool fits =
        first_kept_ == nullptr || !dialect || source_dialect(source_config_) == dialect;
    return fits ? Status() : cannot_keep(*first_kept_);
  }

  static Status cannot_keep(const DecidedMatrix& decided) {
    return make_error(StatusCode::kUnsupported,
                      "{}: would stay {} ({}), which the written config cannot describe beside the "
                      "other schemes; --others bf16 decodes what the model's rules leave out, "
                      "--rule 'PATTERN=SCHEME' makes another choice",
                      decided.matrix->where(), decided.matrix->format(), decided.decision.rule);
  }

  [[nodiscard]] std::vector<std::string> others(const std::vector<std::string>& modules) const {
    const std::set<std::string_view> mine(modules.begin(), modules.end());
    std::vector<std::string> rest;
    for (const std::string& module : all_) {
      if (mine.count(module) == 0) {
        rest.push_back(module);
      }
    }
    return rest;
  }

  const Json& source_config_;
  StoredQuantization stored_;
  std::vector<std::pair<QuantScheme, std::vector<std::string>>> uses_;
  std::vector<std::string> all_;
  const DecidedMatrix* first_kept_ = nullptr;
  bool head_seen_ = false;
};

}  // namespace

Json source_transforms(const Json& config) {
  const Json* quantization = source_quantization(config);
  const Json* transforms =
      quantization == nullptr ? nullptr : quantization->find("transform_config");
  const Json* groups = transforms == nullptr ? nullptr : transforms->find("config_groups");
  const bool any = groups != nullptr && groups->is_object() && !groups->as_object().empty();
  return any ? *transforms : Json();
}

std::vector<std::string> module_patterns(const std::vector<std::string>& modules,
                                         const std::vector<std::string>& others) {
  std::set<std::string> taken;
  for (const std::string& module : others) {
    taken.insert(generalized(module));
  }
  std::vector<std::string> patterns;
  std::set<std::string> seen;
  for (const std::string& module : modules) {
    std::string pattern = generalized(module);
    if (taken.count(pattern) != 0) {
      patterns.push_back(module);
    } else if (seen.insert(pattern).second) {
      patterns.push_back(std::move(pattern));
    }
  }
  return patterns;
}

Result<Json> written_config(const std::vector<DecidedMatrix>& matrices,
                            std::optional<Dialect> dialect,
                            KvCacheScheme kv_cache,
                            const Json& source_config) {
  ConfigCollector collector(source_config);
  for (const DecidedMatrix& decided : matrices) {
    NIBBLE_RETURN_IF_ERROR(collector.add(decided));
  }
  return collector.finish(dialect, kv_cache);
}

}  // namespace nibble
