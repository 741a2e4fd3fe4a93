#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/source_matrix.h"
#include "quantizer/rules.h"

namespace nibble {

/// A matrix and what was decided about it.
struct DecidedMatrix {
  const SourceMatrix* matrix = nullptr;
  ModuleKind kind = ModuleKind::kLinear;
  Decision decision;
  bool encoded = false;  // false: its tensors pass byte for byte
};

/// Whether the matrix is stored as plain floating-point numbers.
[[nodiscard]] bool is_plain_source(const SourceMatrix& matrix);
/// What the matrix will be stored as: a scheme's name, "plain", or the format that it has.
[[nodiscard]] std::string final_form(const DecidedMatrix& matrix);
/// Layers that inference fuses into one: q/k/v, gate/up, w1/w3, and the two first projections of
/// latent attention. The name of the set that a module belongs to; empty when it is in none.
[[nodiscard]] std::string fused_set(std::string_view module);

/// Refuses (kInvalidArgument, naming the module, the rule that decided and the remedy) what is a
/// mistake of the rules: a protected module that would be quantized without --include, experts of a
/// layer that differ, fused layers that differ.
Status check_decisions(const std::vector<DecidedMatrix>& matrices);

}  // namespace nibble
