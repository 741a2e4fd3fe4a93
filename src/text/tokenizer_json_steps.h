#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/pretokenizer.h"
#include "text/tokenizer_normalizer.h"

// Sections of tokenizer.json that are lists of steps. `where` names file and section in errors;
// all fail with kCorrupt for a wrong field and kUnsupported for an unknown step.

namespace nibble::internal {

/// How pieces turn into text when the vocabulary is not byte-level.
struct DecoderSteps {
  std::vector<std::pair<std::string, std::string>> replacements;  // from, to
  bool byte_fallback = false;                                     // <0xNN> pieces are bytes
  bool strip_leading_space = false;
};

/// A member that is there and not null, else nullptr.
[[nodiscard]] const Json* member(const Json& object, std::string_view key);
/// The "type" member, "" if there is none.
[[nodiscard]] std::string type_of(const Json& object);

Status add_normalizer_steps(const Json& json, const std::string& where, Normalizer& normalizer);

/// True if the words are byte-level (a ByteLevel step is among them).
Result<bool> add_pre_tokenizer_steps(const Json& json,
                                     const std::string& where,
                                     PreTokenizer& pre_tokenizer);

Status add_decoder_steps(const Json& json, const std::string& where, DecoderSteps& decoder);

/// Ids that the post-processor puts before a single text.
Status add_prompt_prefix(const Json& json, const std::string& where, std::vector<int32_t>& prefix);

/// Text of one piece after the decoder's replacements.
[[nodiscard]] std::string decoded_piece(const DecoderSteps& decoder, const std::string& piece);

}  // namespace nibble::internal
