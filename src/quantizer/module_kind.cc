#include "quantizer/module_kind.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace nibble {
namespace {

constexpr auto kNone = std::string_view::npos;

template <size_t kCount>
bool is_one_of(std::string_view word, const std::array<std::string_view, kCount>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

constexpr std::array<std::string_view, 4> kRouters = {"gate", "router", "shared_expert_gate",
                                                      "gate_network"};
constexpr std::array<std::string_view, 4> kHeads = {"lm_head", "classifier", "score", "embed_out"};
constexpr std::array<std::string_view, 5> kVisionParts = {"vision_tower", "visual", "vision_model",
                                                          "mm_projector", "multi_modal_projector"};

// Calls fn(component, the component after it) until it returns true.
template <typename Fn>
bool any_component(std::string_view module, const Fn& fn) {
  for (size_t at = 0; at <= module.size();) {
    const size_t dot = std::min(module.find('.', at), module.size());
    const size_t next =
        dot < module.size() ? std::min(module.find('.', dot + 1), module.size()) : dot;
    const std::string_view following =
        dot < module.size() ? module.substr(dot + 1, next - dot - 1) : std::string_view();
    if (fn(module.substr(at, dot - at), following)) {
      return true;
    }
    at = dot + 1;
  }
  return false;
}

bool as_number(std::string_view text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return !text.empty() && error == std::errc() && end == text.data() + text.size();
}

bool predicts_further(std::string_view module, int64_t hidden_layers) {
  return any_component(module, [&](std::string_view part, std::string_view next) {
    int64_t layer = 0;
    return part == "mtp" || part == "mtp_layers" || part == "nextn" ||
           (part == "layers" && hidden_layers > 0 && as_number(next, layer) &&
            layer >= hidden_layers);
  });
}

}  // namespace

std::string_view last_component(std::string_view module) {
  return module.substr(module.find_last_of('.') + 1);  // npos + 1 is 0
}

std::string_view parent_module(std::string_view module) {
  const size_t dot = module.find_last_of('.');
  return dot == kNone ? std::string_view() : module.substr(0, dot);
}

ModuleKind kind_of(Role role) {
  switch (role) {
    case Role::kEmbedding:
    case Role::kPositions:
      return ModuleKind::kEmbedding;
    case Role::kHead:
      return ModuleKind::kHead;
    case Role::kRouter:
    case Role::kRouterCorrection:
    case Role::kSharedExpertGate:
      return ModuleKind::kRouter;
    case Role::kFinalNorm:
    case Role::kAttentionNorm:
    case Role::kMlpNorm:
    case Role::kQueryNorm:
    case Role::kKeyNorm:
    case Role::kQueryDownNorm:
    case Role::kLatentNorm:
      return ModuleKind::kNorm;
    default:
      return of_a_routed_expert(role) ? ModuleKind::kRoutedExpert : ModuleKind::kLinear;
  }
}

ModuleKind module_kind(std::string_view module, int64_t hidden_layers) {
  const std::string_view last = last_component(module);
  if (last.find("embed") != kNone && last != "embed_out") {
    return ModuleKind::kEmbedding;
  }
  if (last == "wte" || last == "wpe") {
    return ModuleKind::kEmbedding;
  }
  if (last.find("norm") != kNone) {
    return ModuleKind::kNorm;
  }
  if (is_one_of(last, kRouters)) {
    return ModuleKind::kRouter;
  }
  if (last == "A_log" || last == "conv1d") {
    return ModuleKind::kState;
  }
  if (predicts_further(module, hidden_layers)) {
    return ModuleKind::kPrediction;
  }
  if (is_one_of(last, kHeads)) {
    return ModuleKind::kHead;
  }
  if (any_component(module, [](std::string_view part, std::string_view) {
        return is_one_of(part, kVisionParts);
      })) {
    return ModuleKind::kVision;
  }
  const bool expert = any_component(module, [](std::string_view part, std::string_view next) {
    int64_t number = 0;
    return part == "experts" && as_number(next, number);
  });
  return expert ? ModuleKind::kRoutedExpert : ModuleKind::kLinear;
}

std::string_view kind_name(ModuleKind kind) {
  switch (kind) {
    case ModuleKind::kLinear:
      return "a linear layer";
    case ModuleKind::kRoutedExpert:
      return "a routed expert";
    case ModuleKind::kRouter:
      return "a router";
    case ModuleKind::kNorm:
      return "a norm";
    case ModuleKind::kEmbedding:
      return "an embedding";
    case ModuleKind::kHead:
      return "an output head";
    case ModuleKind::kPrediction:
      return "a layer that predicts further tokens (MTP)";
    case ModuleKind::kState:
      return "a part of a state-space layer";
    case ModuleKind::kVision:
      return "a part of the vision tower";
  }
  return "";
}

bool is_protected(ModuleKind kind) {
  return kind == ModuleKind::kRouter || kind == ModuleKind::kNorm ||
         kind == ModuleKind::kEmbedding || kind == ModuleKind::kPrediction ||
         kind == ModuleKind::kState;
}

}  // namespace nibble
