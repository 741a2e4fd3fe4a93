#pragma once

#include <cstdint>
#include <span>

#include "backend/step.h"
#include "layers/row_observer.h"
#include "layers/scratch.h"
#include "ops/kv.h"

namespace nibble {

/// What a layer needs to run one step. The scratch memory belongs to the model, holds the largest
/// step and has what the layer's scratch() declares; layers may overwrite it.
struct ForwardContext {
  Step& step;
  int64_t rows = 0;                              // tokens of the step
  std::span<const SequenceSpan> sequences;       // with their pages in the pool of `kv`
  KvView kv;                                     // pages of the layer that runs
  std::span<const SequenceSpan> residuals = {};  // with their pages in its residual, if it has one
  Scratch scratch;
  RowObserver* observer = nullptr;  // of all products but those of routed experts; null: nobody
};

}  // namespace nibble
