#include NIBBLE_VECTORS
// The vocabulary comes first.
#include "backend/cpu/amx/amx_attention.h"

namespace nibble::cpu::NIBBLE_ISA {
namespace {

void attention(const AttentionTask& task) {
  switch (task.kv.kernel) {
    case 0:
      return attention_f32(task);
    case 1:
      return attention_in_tiles<1>(task);
    case 2:
      return attention_in_tiles<2>(task);
    default:
      return attention_in_tiles<3>(task);
  }
}

}  // namespace

extern const AttentionKernels kTileAttention;
constinit const AttentionKernels kTileAttention = {
    .attention_rows = kQueryRows,
    .attention = attention,
    .merge_attention = merge_attention,
};

}  // namespace nibble::cpu::NIBBLE_ISA
