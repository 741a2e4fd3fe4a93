#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace nibble {

/// Control tokens of a tokenizer without a trained vocabulary.
struct ByteTokenizerTokens {
  std::optional<int32_t> bos;  // put before every prompt
  std::vector<int32_t> eos;    // the first is the tokenizer's own end token
};

/// Files of a byte-level tokenizer: one token per byte, in the lowest ids that no control token
/// has. All other ids decode to nothing.
struct ByteTokenizerFiles {
  Json tokenizer;         // tokenizer.json
  Json tokenizer_config;  // tokenizer_config.json, with a chat template that joins the messages
};
[[nodiscard]] ByteTokenizerFiles make_byte_tokenizer(const ByteTokenizerTokens& tokens);

}  // namespace nibble
