#pragma once

#include <span>
#include <string>
#include <vector>

#include "server/schema_embedding.h"

namespace nibble {

/// The first `dimensions` numbers of a pooled vector; a vector of zeros has no length and stays
/// one.
[[nodiscard]] std::vector<float> embedding_of(std::span<const float> pooled,
                                              int64_t dimensions,
                                              VectorLength length);

/// As JSON: an array of the shortest numbers that read back as these, or a string of base64.
[[nodiscard]] std::string embedding_json(std::span<const float> embedding,
                                         EmbeddingEncoding encoding);

/// The most bytes that embedding_json() takes.
[[nodiscard]] int64_t longest_embedding(int64_t dimensions, EmbeddingEncoding encoding);

}  // namespace nibble
