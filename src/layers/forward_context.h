#pragma once

#include <cstdint>
#include <span>

#include "backend/step.h"
#include "ops/kv.h"

namespace nibble {

/// What a layer needs to run one step. The scratch memory belongs to the model and holds the
/// largest step; layers may overwrite it.
struct ForwardContext {
  Step& step;
  int64_t rows = 0;  // tokens of the step
  std::span<const SequenceSpan> sequences;
  KvView kv;             // pages of the layer that runs
  Activations qkv;       // [rows, (heads + 2 kv_heads) * head_dim]
  Activations attended;  // [rows, heads * head_dim]
  Activations gate_up;   // [rows, 2 * intermediate]
};

}  // namespace nibble
