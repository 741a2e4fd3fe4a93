#include "quantizer/budget/candidates.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "quantizer/encoder.h"
#include "quantizer/module_kind.h"
#include "quantizer/plan_checks.h"
#include "quantizer/rules.h"

namespace nibble {
namespace {

constexpr std::string_view kKeep = "keep";
constexpr std::string_view kExperts = ".experts.";
constexpr int64_t kBitsPerByte = 8;

/// "model.layers.0.mlp.experts.*" of an expert's matrix; empty where the name has no such part.
std::string all_experts(const std::string& module) {
  const size_t at = module.rfind(kExperts);
  return at == std::string::npos ? std::string() : module.substr(0, at + kExperts.size()) + "*";
}

/// The first number among the parts of a name; 0 where there is none.
int64_t layer_of(std::string_view module) {
  for (size_t at = 0; at < module.size();) {
    const size_t dot = std::min(module.find('.', at), module.size());
    int64_t layer = 0;
    const auto [end, error] = std::from_chars(module.data() + at, module.data() + dot, layer);
    if (error == std::errc() && end == module.data() + dot) {
      return layer;
    }
    at = dot + 1;
  }
  return 0;
}

std::string tie_of(const std::string& module) {
  const std::string fused = fused_set(module);
  return fused.empty() ? module : fused;
}

int64_t slot_size(const TensorSlot& slot) {
  const int64_t numbers =
      std::accumulate(slot.shape.begin(), slot.shape.end(), int64_t{1}, std::multiplies<>());
  return numbers * dtype_bits(slot.dtype) / kBitsPerByte;
}

}  // namespace

Result<std::vector<SchemeChoice>> parse_scheme_choices(const std::vector<std::string>& names) {
  std::vector<SchemeChoice> choices;
  bool any = false;
  for (const std::string& name : names) {
    SchemeChoice choice{.name = name, .scheme = std::nullopt};
    if (name != kKeep) {
      const auto scheme = find_scheme(name);
      NIBBLE_RETURN_IF_ERROR(scheme.status().with_context("--schemes"));
      if (!scheme->weight.quantized()) {
        return make_error(StatusCode::kInvalidArgument,
                          "--schemes: {} quantizes nothing; {} leaves matrices as they are", name,
                          kKeep);
      }
      if (in_blocks(scheme->act)) {
        return make_error(StatusCode::kUnsupported,
                          "--schemes: {} chooses precisions of activations for a whole model; "
                          "nibble quantize --scheme {} makes it",
                          name, name);
      }
      choice.scheme = *scheme;
      any = true;
    }
    if (std::ranges::any_of(choices, [&](const SchemeChoice& c) { return c.name == name; })) {
      return make_error(StatusCode::kInvalidArgument, "--schemes: {} is given twice", name);
    }
    choices.push_back(std::move(choice));
  }
  if (!any) {
    return make_error(StatusCode::kInvalidArgument,
                      "--schemes: names no scheme that quantizes; give some, with commas between");
  }
  return choices;
}

Result<Dialect> common_dialect(const std::vector<SchemeChoice>& choices,
                               std::optional<Dialect> asked) {
  const auto first = std::ranges::find_if(
      choices, [](const SchemeChoice& choice) { return choice.scheme.has_value(); });
  CHECK(first != choices.end());
  std::string refused;
  for (const Dialect dialect :
       {asked.value_or(default_dialect(*first->scheme)), Dialect::kCompressedTensors}) {
    refused.clear();
    for (const SchemeChoice& choice : choices) {
      if (choice.scheme && !check_dialect(dialect, *choice.scheme).ok()) {
        refused += (refused.empty() ? "" : ", ") + choice.name;
      }
    }
    if (refused.empty()) {
      return dialect;
    }
    if (asked) {
      break;
    }
  }
  return make_error(StatusCode::kUnsupported,
                    "--schemes: one folder has one form, and {} cannot store {}; leave these out, "
                    "or choose another --format",
                    dialect_name(asked.value_or(Dialect::kCompressedTensors)), refused);
}

int64_t Candidate::weights() const {
  return std::accumulate(
      matrices.begin(), matrices.end(), int64_t{0},
      [](int64_t sum, const SourceMatrix* matrix) { return sum + matrix->n() * matrix->k(); });
}

Result<std::vector<Candidate>> list_candidates(const SourceModel& source,
                                               const Json& config,
                                               const std::vector<SchemeChoice>& choices) {
  const auto first = std::ranges::find_if(
      choices, [](const SchemeChoice& choice) { return choice.scheme.has_value(); });
  CHECK(first != choices.end());
  RuleOptions options;
  options.scheme = *first->scheme;
  NIBBLE_ASSIGN_OR_RETURN(RuleSet rules, RuleSet::create(options, config));
  std::vector<Candidate> candidates;
  std::map<std::string, size_t> experts;  // where their candidate is
  for (const auto& matrix : source.matrices) {
    const std::string& module = matrix->module();
    NIBBLE_ASSIGN_OR_RETURN(const Decision decision, rules.decide(module));
    if (!decision.scheme || !decision.scheme->weight.quantized()) {
      continue;
    }
    const std::string all =
        rules.kind(module) == ModuleKind::kRoutedExpert ? all_experts(module) : std::string();
    if (all.empty()) {
      candidates.push_back({.name = module,
                            .kind = std::string(last_component(module)),
                            .layer = layer_of(module),
                            .tied = tie_of(module),
                            .matrices = {matrix.get()}});
      continue;
    }
    const auto [found, added] = experts.emplace(all, candidates.size());
    if (added) {
      candidates.push_back(
          {.name = all, .kind = "experts", .layer = layer_of(module), .tied = all, .matrices = {}});
    }
    candidates[found->second].matrices.push_back(matrix.get());
  }
  if (candidates.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "the model has no matrices that the rules for it ({}) quantize",
                      rules.family());
  }
  return candidates;
}

Result<StoredSize> stored_size(const Candidate& candidate,
                               const SchemeChoice& choice,
                               Dialect dialect) {
  StoredSize size;
  for (const SourceMatrix* matrix : candidate.matrices) {
    if (!choice.scheme) {
      const int64_t stored =
          is_plain_source(*matrix)
              ? matrix->n() * matrix->k() * dtype_bits(matrix->tensors()[0]->dtype) / kBitsPerByte
              : bytes_of(matrix->touched(0, matrix->n()));
      size.bytes += stored;
      size.bits += static_cast<double>(stored * kBitsPerByte);
      continue;
    }
    const auto encoder =
        make_encoder({.scheme = *choice.scheme, .dialect = dialect}, matrix->n(), matrix->k());
    NIBBLE_RETURN_IF_ERROR(encoder.status().with_context(matrix->where()));
    for (const TensorSlot& slot : (*encoder)->slots()) {
      size.bytes += slot_size(slot);
    }
    size.bits += bits_per_weight(choice.scheme->weight, matrix->k()) *
                 static_cast<double>(matrix->n() * matrix->k());
  }
  return size;
}

}  // namespace nibble
