#pragma once

#include <cstdint>

namespace nibble {

/// What is made of the final hidden states of a prompt, those behind the last norm.
enum class Pooling : uint8_t {
  kNone,  // nothing
  kLast,  // that of its last token
  kMean,  // the mean over its tokens
};

}  // namespace nibble
