#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ops/activations.h"

namespace nibble {

/// Memory that layers write and read within one step. Layers run one after the other and share it.
enum class ScratchName : uint8_t { kQkv, kAttended, kUp, kNormed, kShared, kQueries, kAbsorbed };
inline constexpr size_t kScratchNames = 7;

/// What a kind of layer needs of it, by the model's facts alone, so that memory can be planned
/// before weights are loaded: `width` numbers for each row of a step, in Backend's
/// activation_type().
struct ScratchNeed {
  ScratchName name = ScratchName::kQkv;
  int64_t width = 0;
};

/// Where it lies: [rows, width] each.
class Scratch {
 public:
  void set(ScratchName name, Activations memory) { memory_[static_cast<size_t>(name)] = memory; }
  [[nodiscard]] Activations operator[](ScratchName name) const {
    return memory_[static_cast<size_t>(name)];
  }

 private:
  std::array<Activations, kScratchNames> memory_;
};

}  // namespace nibble
