#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "server/error.h"
#include "server/ignored_fields.h"
#include "server/schema.h"

namespace nibble {

/// How numbers are sent: as JSON, or as little-endian float32 in base64.
enum class EmbeddingEncoding : uint8_t { kFloat, kBase64 };

/// Whether vectors are divided by their length.
enum class VectorLength : uint8_t { kOne, kAsComputed };

/// A checked body of /v1/embeddings.
struct EmbeddingRequest {
  std::string model;
  std::vector<PromptInput> inputs;
  EmbeddingEncoding encoding = EmbeddingEncoding::kFloat;
  std::optional<int64_t> dimensions;
  std::optional<int64_t> truncate_prompt_tokens;  // the last so many are kept; -1: all that fit
  bool add_special_tokens = true;
  VectorLength length = VectorLength::kOne;
  std::string cache_salt;
  int64_t priority = 0;
  IgnoredFields ignored;
};

/// The error names the field in `param`.
[[nodiscard]] std::variant<EmbeddingRequest, ApiError> parse_embedding_request(
    std::string_view body, Strictness strictness);

}  // namespace nibble
