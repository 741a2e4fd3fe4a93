#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "arch/config.h"
#include "quantizer/plan.h"
#include "quantizer/shard_store.h"

namespace nibble {

/// Matrices with one input: of a layer those of attention, of a dense MLP, of the expert that every
/// token takes and of each routed one; and the output head, which counts to the layer after the
/// last.
enum class Site : uint8_t {
  kQkv,
  kOutput,
  kUp,
  kDown,
  kSharedUp,
  kSharedDown,
  kExpertUp,
  kExpertDown,
  kHead,
};
inline constexpr size_t kSites = 9;

/// Whether devices that share a model divide the columns of a site's matrices, not the rows.
[[nodiscard]] constexpr bool devices_may_split(Site site) {
  return site == Site::kOutput || site == Site::kDown || site == Site::kSharedDown;
}

/// Rows that enter products: those of a layer's site, of kExpertDown those of one expert. Gate and
/// up of all routed experts read the same rows, which are rounded once.
struct SiteInput {
  int64_t layer = 0;
  Site site = Site::kQkv;
  int64_t expert = 0;

  // clang-tidy 14 takes a 0 in what the compiler makes of it for a pointer.
  // NOLINTNEXTLINE(modernize-use-nullptr)
  [[nodiscard]] auto operator<=>(const SiteInput&) const = default;
};

/// The jobs of a plan that calibration makes, by layer and site.
class LayerJobs final {
 public:
  LayerJobs(const QuantizePlan& plan, const ModelConfig& config);

  /// expert: of the routed ones' sites.
  [[nodiscard]] const std::vector<size_t>& of(int64_t layer, Site site, int64_t expert = 0) const;
  /// All that read these rows: of kExpertUp those of every expert, in their order.
  [[nodiscard]] std::vector<size_t> readers(const SiteInput& rows) const;
  [[nodiscard]] const std::set<size_t>& all() const { return all_; }
  [[nodiscard]] bool all_done(const ShardStore& store) const;
  [[nodiscard]] bool layer_done(int64_t layer, const ShardStore& store) const;

 private:
  std::map<std::tuple<int64_t, Site, int64_t>, std::vector<size_t>> jobs_;
  std::set<size_t> all_;
};

/// Columns of the widest of these matrices; 0 without any.
[[nodiscard]] int64_t widest_input(const QuantizePlan& plan, const LayerJobs& jobs);

}  // namespace nibble
