#include NIBBLE_VECTORS
// The vocabulary comes first.
#include "backend/cpu/kernels/attention_kernels.h"

namespace nibble::cpu::NIBBLE_ISA {
namespace {

void attention(const AttentionTask& task) {
  switch (task.kv.kernel) {
    case 0:
      return attention_f32(task);
    case 1:
      return attention_of<1>(task);
    case 2:
      return attention_of<2>(task);
    default:
      return attention_of<3>(task);
  }
}

}  // namespace

extern const AttentionKernels kAttention;
constinit const AttentionKernels kAttention = {
    .attention_rows = 256,
    .attention = attention,
    .merge_attention = merge_attention,
};

}  // namespace nibble::cpu::NIBBLE_ISA
