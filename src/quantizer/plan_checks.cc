#include "quantizer/plan_checks.h"

#include <algorithm>
#include <array>
#include <span>
#include <unordered_map>

namespace nibble {
namespace {

struct FusedSet {
  std::string_view name;
  std::array<std::string_view, 3> parts;
};

constexpr std::array<FusedSet, 4> kFusedSets = {{
    {"q/k/v", {"q_proj", "k_proj", "v_proj"}},
    {"gate/up", {"gate_proj", "up_proj", ""}},
    {"w1/w3", {"w1", "w3", ""}},
    {"q_a/kv_a", {"q_a_proj", "kv_a_proj_with_mqa", ""}},
}};

// "model.layers.3.mlp.experts" and "up_proj" of an expert's matrix: what its siblings share.
std::string expert_family(std::string_view module) {
  const size_t at = module.rfind(".experts.");
  constexpr size_t kLength = 9;
  if (at == std::string_view::npos) {
    return {};
  }
  const size_t dot = module.find('.', at + kLength);
  return fmt::format("{}.experts.*{}", module.substr(0, at),
                     dot == std::string_view::npos ? std::string_view() : module.substr(dot));
}

Status check_protected(const DecidedMatrix& matrix) {
  const auto& scheme = matrix.decision.scheme;
  if (scheme && scheme->weight.quantized() && is_protected(matrix.kind) &&
      !matrix.decision.included) {
    return make_error(StatusCode::kInvalidArgument,
                      "{} is {} and would be quantized by {}; narrow the pattern, or name the "
                      "module with --include if that is meant",
                      matrix.matrix->module(), kind_name(matrix.kind), matrix.decision.rule);
  }
  return {};
}

Status differ(std::string_view what, const DecidedMatrix& a, const DecidedMatrix& b) {
  return make_error(StatusCode::kInvalidArgument,
                    "{} must be stored alike, but {} becomes {} ({}) and {} becomes {} ({}); write "
                    "rules that name all of them",
                    what, a.matrix->module(), final_form(a), a.decision.rule, b.matrix->module(),
                    final_form(b), b.decision.rule);
}

}  // namespace

bool is_plain_source(const SourceMatrix& matrix) {
  const auto& tensors = matrix.tensors();
  if (tensors.size() != 1) {
    return false;
  }
  const DType dtype = tensors[0]->dtype;
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

std::string final_form(const DecidedMatrix& matrix) {
  const auto& scheme = matrix.decision.scheme;
  if (matrix.encoded && scheme) {
    return scheme->weight.quantized() ? std::string(scheme->name) : "plain";
  }
  return is_plain_source(*matrix.matrix) ? "plain" : matrix.matrix->format();
}

std::string fused_set(std::string_view module) {
  const std::string_view last = last_component(module);
  for (const FusedSet& set : kFusedSets) {
    if (std::find(set.parts.begin(), set.parts.end(), last) != set.parts.end()) {
      return fmt::format("{} of {}", set.name, parent_module(module));
    }
  }
  return {};
}

Status check_decisions(const std::vector<DecidedMatrix>& matrices) {
  std::unordered_map<std::string, const DecidedMatrix*> fused;
  std::unordered_map<std::string, const DecidedMatrix*> experts;
  for (const DecidedMatrix& matrix : matrices) {
    NIBBLE_RETURN_IF_ERROR(check_protected(matrix));
    const std::string& module = matrix.matrix->module();
    if (const std::string set = fused_set(module); !set.empty()) {
      const DecidedMatrix* first = fused.emplace(set, &matrix).first->second;
      if (final_form(*first) != final_form(matrix)) {
        return differ(set, *first, matrix);
      }
    }
    if (matrix.kind == ModuleKind::kRoutedExpert) {
      const std::string family = expert_family(module);
      const DecidedMatrix* first = experts.emplace(family, &matrix).first->second;
      if (final_form(*first) != final_form(matrix)) {
        return differ(family, *first, matrix);
      }
    }
  }
  return {};
}

}  // namespace nibble
