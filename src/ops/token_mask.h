#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace nibble {

/// Words of a mask of tokens: bit token % 32 of word token / 32 is set where the token may come.
constexpr int64_t mask_words(int64_t vocab_size) { return (vocab_size + 31) / 32; }

[[nodiscard]] constexpr bool mask_allows(std::span<const uint32_t> mask, int64_t token) {
  return ((mask[static_cast<size_t>(token / 32)] >> (token % 32)) & 1U) != 0;
}

/// What the tokens of one answer must obey: a grammar, for instance. It follows the answer token by
/// token. Calls come from one thread at a time.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  /// Writes which tokens may come next to mask [mask_words(vocab_size)], all words. Returns false,
  /// with nothing written, where all may. Where nothing may come because of a failure, accept()
  /// says which.
  [[nodiscard]] virtual bool fill(std::span<uint32_t> mask) = 0;
  /// Takes down the token that came. kInvalidArgument for one that may not.
  [[nodiscard]] virtual Status accept(int32_t token) = 0;
};

}  // namespace nibble
