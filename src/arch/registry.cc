#include <algorithm>
#include <array>
#include <charconv>
#include <string>

#include <fmt/core.h>

#include "arch/families/families.h"
#include "base/check.h"

namespace nibble {
namespace {

// What most decoders call their modules.
constexpr std::array kDecoderNames = {
    RoleName{Role::kEmbedding, "model.embed_tokens"},
    RoleName{Role::kFinalNorm, "model.norm"},
    RoleName{Role::kHead, "lm_head"},
    RoleName{Role::kAttentionNorm, "model.layers.{}.input_layernorm"},
    RoleName{Role::kQuery, "model.layers.{}.self_attn.q_proj"},
    RoleName{Role::kKey, "model.layers.{}.self_attn.k_proj"},
    RoleName{Role::kValue, "model.layers.{}.self_attn.v_proj"},
    RoleName{Role::kAttentionOutput, "model.layers.{}.self_attn.o_proj"},
    RoleName{Role::kQueryNorm, "model.layers.{}.self_attn.q_norm"},
    RoleName{Role::kKeyNorm, "model.layers.{}.self_attn.k_norm"},
    RoleName{Role::kSinks, "model.layers.{}.self_attn.sinks"},
    RoleName{Role::kQueryDown, "model.layers.{}.self_attn.q_a_proj"},
    RoleName{Role::kQueryDownNorm, "model.layers.{}.self_attn.q_a_layernorm"},
    RoleName{Role::kQueryUp, "model.layers.{}.self_attn.q_b_proj"},
    RoleName{Role::kLatentDown, "model.layers.{}.self_attn.kv_a_proj_with_mqa"},
    RoleName{Role::kLatentNorm, "model.layers.{}.self_attn.kv_a_layernorm"},
    RoleName{Role::kLatentUp, "model.layers.{}.self_attn.kv_b_proj"},
    RoleName{Role::kMlpNorm, "model.layers.{}.post_attention_layernorm"},
    RoleName{Role::kGate, "model.layers.{}.mlp.gate_proj"},
    RoleName{Role::kUp, "model.layers.{}.mlp.up_proj"},
    RoleName{Role::kDown, "model.layers.{}.mlp.down_proj"},
    RoleName{Role::kRouter, "model.layers.{}.mlp.gate"},
    RoleName{Role::kRouterCorrection, "model.layers.{}.mlp.gate.e_score_correction_bias"},
    RoleName{Role::kSharedGate, "model.layers.{}.mlp.shared_experts.gate_proj"},
    RoleName{Role::kSharedUp, "model.layers.{}.mlp.shared_experts.up_proj"},
    RoleName{Role::kSharedDown, "model.layers.{}.mlp.shared_experts.down_proj"},
    RoleName{Role::kSharedExpertGate, "model.layers.{}.mlp.shared_expert_gate"},
    RoleName{Role::kExpertsGateUpBias, "model.layers.{}.mlp.experts.gate_up_proj_bias"},
    RoleName{Role::kExpertsDownBias, "model.layers.{}.mlp.experts.down_proj_bias"},
    RoleName{Role::kExpertGate, "model.layers.{}.mlp.experts.{}.gate_proj"},
    RoleName{Role::kExpertUp, "model.layers.{}.mlp.experts.{}.up_proj"},
    RoleName{Role::kExpertDown, "model.layers.{}.mlp.experts.{}.down_proj"},
};

std::string_view pattern_of(const Family& family, Role role) {
  for (const auto names : {family.names, std::span<const RoleName>(kDecoderNames)}) {
    const auto found = std::ranges::find(names, role, &RoleName::role);
    if (found != names.end()) {
      return found->module;
    }
  }
  return {};
}

std::string_view text_of(const Json* value) {
  return value != nullptr && value->is_string() ? std::string_view(value->as_string())
                                                : std::string_view();
}

const Family* family_of_type(std::string_view model_type) {
  const auto found = std::ranges::find(kFamilies, model_type, &Family::model_type);
  return model_type.empty() || found == kFamilies.end() ? nullptr : *found;
}

const Family* family_of_architecture(std::string_view architecture) {
  const auto found = std::ranges::find(kFamilies, architecture, &Family::architecture);
  return found == kFamilies.end() ? nullptr : *found;
}

}  // namespace

Result<const Family*> find_family(std::string_view architecture,
                                  std::string_view model_type,
                                  std::string_view where) {
  const Family* by_type = family_of_type(model_type);
  if (by_type != nullptr && by_type->architecture == architecture) {
    return by_type;
  }
  const Family* family = family_of_architecture(architecture);
  if (family != nullptr && by_type == nullptr) {
    return family;
  }
  if (family != nullptr) {
    return make_error(StatusCode::kCorrupt,
                      "{}: architectures names \"{}\", but model_type \"{}\" belongs to \"{}\"; "
                      "correct the one that does not fit the weights",
                      where, architecture, model_type, by_type->architecture);
  }
  std::string known;
  for (const Family* each : kFamilies) {
    if (known.find(each->architecture) == std::string::npos) {
      known += known.empty() ? "" : ", ";
      known += each->architecture;
    }
  }
  return make_error(StatusCode::kUnsupported,
                    "{}: field architectures: \"{}\" is not known to this build; it knows {}",
                    where, architecture, known);
}

Result<const Family*> find_gguf_family(std::string_view architecture,
                                       GgufExperts experts,
                                       std::string_view where) {
  std::string known;
  for (const Family* each : kFamilies) {
    if (!each->gguf.has_value()) {
      continue;
    }
    if (each->gguf->architecture == architecture &&
        each->gguf->experts == (experts == GgufExperts::kSome)) {
      return each;
    }
    known += known.empty() ? "" : ", ";
    known += each->gguf->architecture;
    known += each->gguf->experts ? " (experts)" : "";
  }
  return make_error(
      StatusCode::kUnsupported,
      "{}: key general.architecture: \"{}\"{} is not known to this build; GGUF files of "
      "{} are read",
      where, architecture, experts == GgufExperts::kSome ? " with experts" : "", known);
}

const Family* guess_family(const Json& config) {
  const Json* text = config.find("text_config");
  for (const Json* from : {&config, text}) {
    const Json* type = from == nullptr ? nullptr : from->find("model_type");
    if (const Family* family = family_of_type(text_of(type))) {
      return family;
    }
  }
  const Json* names = config.find("architectures");
  const bool named = names != nullptr && names->is_array() && !names->as_array().empty();
  return named ? family_of_architecture(text_of(&names->as_array().front())) : nullptr;
}

const Family* family_as_stored(const Family* family,
                               const std::function<bool(std::string_view tensor)>& stored) {
  const auto fits = [&](const Family& each) {
    return stored(module_name(each, Role::kEmbedding) + ".weight");
  };
  const bool other = family->renamed != nullptr && !fits(*family) && fits(*family->renamed);
  return other ? family->renamed : family;
}

std::optional<int64_t> number_of(std::string_view pattern, std::string_view module) {
  std::optional<int64_t> first;
  while (true) {
    const size_t hole = std::min(pattern.find("{}"), pattern.size());
    if (!module.starts_with(pattern.substr(0, hole))) {
      return std::nullopt;
    }
    module.remove_prefix(hole);
    if (hole == pattern.size()) {
      return module.empty() ? std::optional(first.value_or(0)) : std::nullopt;
    }
    pattern.remove_prefix(hole + 2);
    const size_t digits = std::min(module.find_first_not_of("0123456789"), module.size());
    int64_t number = 0;
    const auto read = std::from_chars(module.data(), module.data() + digits, number);
    if (read.ec != std::errc()) {
      return std::nullopt;
    }
    first = first.value_or(number);
    module.remove_prefix(digits);
  }
}

std::string module_name(const Family& family, Role role, int64_t layer, int64_t expert) {
  const std::string_view pattern = pattern_of(family, role);
  CHECK_MSG(!pattern.empty(), "role {} has no name in {}", static_cast<int>(role), family.name);
  return std::string(family.prefix) + fmt::format(fmt::runtime(pattern), layer, expert);
}

bool of_another_model(const Family& family, std::string_view tensor) {
  return std::ranges::any_of(family.others,
                             [&](std::string_view prefix) { return tensor.starts_with(prefix); });
}

std::string layer_prefix(const Family& family, int64_t layer) {
  const std::string_view pattern = pattern_of(family, Role::kAttentionNorm);
  return fmt::format("{}{}{}.", family.prefix, pattern.substr(0, pattern.find("{}")), layer);
}

std::optional<Role> role_of(const Family& family, std::string_view module) {
  if (!module.starts_with(family.prefix)) {
    return std::nullopt;
  }
  module.remove_prefix(family.prefix.size());
  for (const RoleName& name : family.names) {
    if (number_of(name.module, module)) {
      return name.role;
    }
  }
  for (const RoleName& name : kDecoderNames) {
    if (pattern_of(family, name.role) == name.module && number_of(name.module, module)) {
      return name.role;
    }
  }
  return std::nullopt;
}

}  // namespace nibble
