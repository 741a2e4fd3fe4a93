#pragma once

#include <atomic>
#include <cstdint>

#include "backend/cpu/kernel_table.h"
#include "ops/kv.h"

namespace nibble::cpu {

/// Of one head and token.
struct KvSlot {
  int64_t page = 0;
  int64_t residual_page = 0;  // where the format has a residual
  int64_t kv_head = 0;
  int64_t slot = 0;  // in the page
};

/// Writes keys and values into the pages of a layer. Threads may share it.
class KvWriter final {
 public:
  KvWriter(const KernelTable& kernels, const KvView& kv, const KvLayout& layout)
      : kernels_(kernels), kv_(kv), layout_(layout) {}

  /// x [head_dim], as it enters the cache; clobbered.
  void write_key(const KvSlot& slot, float* x) const;
  void write_value(const KvSlot& slot, float* x) const;
  /// Of latent attention: the latent, then the rotated key. kv_head and residual_page are 0.
  void write_latent(const KvSlot& slot, const float* x) const;
  /// Codes the kChannelTokens keys from `slot` on, which the residual has.
  ///   scratch  at least 2 kChannelTokens kMaxHeadDim + 4 kMaxHeadDim floats
  void code_keys(const KvSlot& slot, float* scratch) const;
  /// Numbers that were far outside of a static range (kFarSteps), or not finite.
  [[nodiscard]] int64_t far_outside() const { return far_outside_; }

 private:
  struct Place {
    uint8_t* row;
    uint8_t* params;
  };
  [[nodiscard]] Place place(const KvSlot& slot, const KvHalf& half) const;
  void write_row(const Place& place, const float* x, float fp8_scale) const;
  void write_latent_codes(const Place& place, const float* x) const;
  void write_int4_line(const float* x, int64_t count, const Place& to) const;
  void write_static(const float* steps, const float* x, uint8_t* row) const;

  const KernelTable& kernels_;
  const KvView& kv_;
  KvLayout layout_;
  mutable std::atomic<int64_t> far_outside_ = 0;
};

}  // namespace nibble::cpu
