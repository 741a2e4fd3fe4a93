#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/dialect.h"
#include "checkpoint/source_matrix.h"
#include "quant/scheme.h"

namespace nibble {

/// A scheme that matrices may get, or none: "keep", which leaves them as they are.
struct SchemeChoice {
  std::string name;
  std::optional<QuantScheme> scheme;  // empty: keep
};

/// Parses names of schemes and "keep". kInvalidArgument for an unknown name, one given twice, or
/// fewer than one scheme that quantizes.
Result<std::vector<SchemeChoice>> parse_scheme_choices(const std::vector<std::string>& names);

/// The dialect that all of the choices can be written in: `asked` if given, else the first one's
/// default where it takes all, else compressed-tensors. kUnsupported, naming the schemes that do
/// not go together, where there is none: a folder has one quantization_config.
Result<Dialect> common_dialect(const std::vector<SchemeChoice>& choices,
                               std::optional<Dialect> asked);

/// What is given one scheme as a whole: a matrix of attention or of an MLP, or all routed experts
/// of a layer.
struct Candidate {
  std::string name;  // the module, or "model.layers.0.mlp.experts.*": names it in a rule, too
  std::string kind;  // "q_proj", "experts"
  int64_t layer = 0;
  std::string tied;  // candidates with this in common need one scheme: loaders fuse them
  std::vector<const SourceMatrix*> matrices;  // alive as long as the source

  [[nodiscard]] bool experts() const { return kind == "experts"; }
  [[nodiscard]] int64_t weights() const;
};

/// The matrices that the model's ready-made rules quantize, in file order.
///   config  parsed config.json
/// kInvalidArgument when there are none.
Result<std::vector<Candidate>> list_candidates(const SourceModel& source,
                                               const Json& config,
                                               const std::vector<SchemeChoice>& choices);

/// What a candidate takes up.
struct StoredSize {
  int64_t bytes = 0;  // of its tensors in the file
  double bits = 0;    // of codes, scales and zero points; bytes of the tensors where it is kept
};

/// kUnsupported where the scheme does not fit: columns that are no multiple of its groups.
Result<StoredSize> stored_size(const Candidate& candidate,
                               const SchemeChoice& choice,
                               Dialect dialect);

}  // namespace nibble
