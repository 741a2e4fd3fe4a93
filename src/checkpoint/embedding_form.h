#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/pooling.h"

namespace nibble {

/// How embeddings are made of a model's final hidden states; they are normalised in the end.
struct EmbeddingForm {
  Pooling pooling = Pooling::kLast;
  /// Whether the first numbers of a vector are a vector of their own (Matryoshka), and how many
  /// numbers these may have; none listed: any.
  bool can_be_cut = false;
  std::vector<int64_t> dimensions;
};

/// What the files of sentence-transformers beside a model say (modules.json, and config.json of the
/// folder that it names for pooling, else 1_Pooling/config.json), and is_matryoshka and
/// matryoshka_dimensions of the model's config.json. Where there are none, and for a GGUF file, the
/// last token's hidden state. `asked` comes before what they say of pooling.
/// Errors: kCorrupt naming the file; kUnsupported for a module or a pooling that is not computed.
Result<EmbeddingForm> read_embedding_form(const std::string& model, std::optional<Pooling> asked);

/// "last", "mean".
[[nodiscard]] std::string pooling_name(Pooling pooling);

}  // namespace nibble
