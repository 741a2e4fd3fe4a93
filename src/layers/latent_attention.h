#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "arch/config.h"
#include "backend/expanded_latent.h"
#include "backend/prepared_heads.h"
#include "layers/attention.h"
#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/norm.h"
#include "layers/scratch.h"

namespace nibble {

/// hidden += output(attention(norm(hidden))) where keys and values of all heads are made from one
/// cached row per token (multi-head latent attention, DeepSeek-V2, section 2.1), in its absorbed
/// form: a head's queries are multiplied by its part of the matrix that would make keys, attend
/// over the rows themselves, and what comes out is multiplied by the part that would make values.
/// Rows for which keys and values are made after all (Step::absorbed_rows) are left to the step.
class LatentAttention final {
 public:
  struct Parts {
    Norm norm;
    /// [stage + row_dim, hidden]: the first stage of queries, or where they have one stage all of
    /// them, and the row of the cache.
    Linear down;
    std::optional<Norm> q_norm;  // of the first stage; none: queries have one stage
    std::optional<Linear> q_up;  // [heads * query_dim, q_rank], with q_norm
    Norm latent_norm;
    std::unique_ptr<PreparedHeads> keys;    // of each head [kv_rank, nope_dim]
    std::unique_ptr<PreparedHeads> values;  // of each head [value_dim, kv_rank]
    Linear output;                          // [hidden, heads * value_dim]
  };

  LatentAttention(Parts parts, const ModelConfig& config, std::shared_ptr<const RopeTable> rope);

  [[nodiscard]] int64_t weight_bytes() const;

  [[nodiscard]] static std::array<ScratchNeed, 5> scratch(const ModelConfig& config);

  /// hidden [rows, hidden]. Appends the rows to context.kv.
  void forward(float* hidden, const ForwardContext& context);

 private:
  /// Where the queries of all heads lie.
  struct Queries {
    Activations at;
    int64_t stride = 0;
  };

  [[nodiscard]] int64_t first_width() const;  // of `down`, in front of the row of the cache
  [[nodiscard]] LatentRope rope() const;
  Queries project(const float* hidden, const ForwardContext& context);
  [[nodiscard]] float scale() const;
  [[nodiscard]] ExpandedLatentArgs expanded(const Queries& queries,
                                            const ForwardContext& context) const;
  void absorb(const Queries& queries,
              std::span<const RowRange> absorbed,
              const ForwardContext& context);
  void attend(std::span<const RowRange> absorbed, const ForwardContext& context);
  void add_output(float* hidden, const ForwardContext& context);

  Parts parts_;
  LatentConfig form_;
  int64_t heads_;
  std::shared_ptr<const RopeTable> rope_;
};

}  // namespace nibble
