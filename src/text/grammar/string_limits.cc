#include "text/grammar/string_limits.h"

#include <algorithm>
#include <functional>
#include <string>

#include "ops/token_mask.h"

namespace nibble {
namespace {

/// What one token adds to the string that it begins in, and the most that it puts into one that it
/// opens.
struct TokenEffect {
  int64_t added = 0;
  int64_t opened = 0;
};

TokenEffect effect_of(std::string_view token, StringPosition at) {
  TokenEffect out;
  const int64_t before = at.characters;
  bool first = at.inside;
  for (const char byte : token) {
    const bool was_inside = at.inside;
    at.push(byte);
    if (first && at.inside) {
      out.added = at.characters - before;
    } else if (at.inside) {
      out.opened = std::max(out.opened, at.characters);
    }
    first = first && (at.inside || !was_inside);
  }
  return out;
}

void clear(int32_t token, std::span<uint32_t> mask) {
  mask[static_cast<size_t>(token / 32)] &= ~(uint32_t{1} << (token % 32));
}

void clear_above(const std::vector<std::pair<int64_t, int32_t>>& tokens,
                 int64_t most,
                 std::span<uint32_t> mask) {
  for (const auto& [characters, token] : tokens) {
    if (characters <= most) {
      return;
    }
    clear(token, mask);
  }
}

}  // namespace

void StringPosition::push(char byte) {
  if (!inside) {
    if (byte == '"') {
      *this = {.inside = true};
    }
    return;
  }
  if (hex_left > 0) {
    --hex_left;
  } else if (escaped) {
    escaped = false;
    hex_left = byte == 'u' ? 4 : 0;
  } else if (byte == '"') {
    inside = false;
  } else if ((static_cast<unsigned char>(byte) & 0xC0U) != 0x80U) {
    ++characters;
    escaped = byte == '\\';
  }
}

TokenStrings::TokenStrings(std::span<const std::string> tokens)
    : tokens_(tokens.begin(), tokens.end()) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    const TokenEffect within = effect_of(tokens_[i], {.inside = true});
    const TokenEffect outside = effect_of(tokens_[i], {});
    const auto note = [&](Counted& list, int64_t characters) {
      if (characters > 0) {
        list.emplace_back(characters, id);
      }
    };
    note(added_, within.added);
    note(opened_after_, within.opened);
    note(opened_, outside.opened);
  }
  for (Counted* list : {&added_, &opened_, &opened_after_}) {
    std::ranges::sort(*list, std::greater<>());
  }
}

std::string_view TokenStrings::bytes(int32_t token) const {
  return token >= 0 && static_cast<size_t>(token) < tokens_.size()
             ? std::string_view(tokens_[static_cast<size_t>(token)])
             : std::string_view();
}

void TokenStrings::clear_long(const StringPosition& at,
                              std::optional<int64_t> limit,
                              int64_t shortest,
                              std::span<uint32_t> mask) const {
  if (!at.inside) {
    clear_above(opened_, shortest, mask);
    return;
  }
  const int64_t left = limit ? *limit - at.characters : 0;
  if (!at.escaped && at.hex_left == 0) {
    clear_above(opened_after_, shortest, mask);
    if (limit) {
      clear_above(added_, left, mask);
    }
    return;
  }
  // In the middle of an escape, tokens mean something else, and few may come.
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (!mask_allows(mask, static_cast<int64_t>(i))) {
      continue;
    }
    const TokenEffect effect = effect_of(tokens_[i], at);
    if ((limit && effect.added > left) || effect.opened > shortest) {
      clear(static_cast<int32_t>(i), mask);
    }
  }
}

void StringLimits::accept(int32_t token, std::optional<int64_t> limit) {
  for (const char byte : tokens_.bytes(token)) {
    at_.push(byte);
  }
  limit_ = limit;
}

}  // namespace nibble
