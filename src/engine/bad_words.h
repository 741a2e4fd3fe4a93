#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/sequence.h"

namespace nibble {

/// kInvalidArgument: a bad word without tokens, or with one that the vocabulary lacks.
Status check_bad_words(const Request& request, int64_t vocab_size);

/// Whether a ban depends on the answer's last tokens.
[[nodiscard]] bool watches_answer(const Request& request);

/// Appends to `banned` the last token of each bad word whose other tokens the answer ends with.
void add_bad_words(const Sequence& sequence, std::vector<int32_t>& banned);

}  // namespace nibble
