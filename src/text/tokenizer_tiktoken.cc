#include <charconv>

#include "text/tokenizer_loaders.h"

namespace nibble {
namespace {

constexpr auto kLargestRank = static_cast<uint32_t>(kTokenIdLimit);

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+') return 62;
  return c == '/' ? 63 : -1;
}

std::optional<std::string> base64_decoded(std::string_view text) {
  while (text.ends_with('=')) text.remove_suffix(1);
  if (text.size() % 4 == 1) {
    return std::nullopt;
  }
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const int value = base64_value(c);
    if (value < 0) return std::nullopt;
    bits = (bits << 6) | static_cast<uint32_t>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      out += static_cast<char>((bits >> count) & 0xFF);
    }
  }
  return out;
}

// Puts "<base64> <rank>" into pieces[rank].
Status parse_line(std::string_view line, std::vector<std::string>& pieces) {
  const size_t blank = line.find(' ');
  if (blank == std::string_view::npos) {
    return make_error(StatusCode::kCorrupt, "expected '<base64> <rank>', got '{}'",
                      line.substr(0, 40));
  }
  const std::optional<std::string> bytes = base64_decoded(line.substr(0, blank));
  const std::string_view number = line.substr(blank + 1);
  uint32_t rank = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
  if (!bytes || bytes->empty() || error != std::errc() || end != number.data() + number.size() ||
      rank >= kLargestRank) {
    return make_error(StatusCode::kCorrupt, "bad base64 or rank in '{}'", line.substr(0, 40));
  }
  if (pieces.size() <= rank) pieces.resize(rank + 1);
  if (!pieces[rank].empty()) {
    return make_error(StatusCode::kCorrupt, "rank {} occurs twice", rank);
  }
  pieces[rank] = *bytes;
  return {};
}

Result<std::vector<std::string>> parse_ranks(std::string_view text, std::string_view where) {
  std::vector<std::string> pieces;
  size_t line_number = 0;
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    std::string_view line = text.substr(0, newline);
    text.remove_prefix(newline == std::string_view::npos ? text.size() : newline + 1);
    ++line_number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    NIBBLE_RETURN_IF_ERROR(
        parse_line(line, pieces).with_context(fmt::format("{}: line {}", where, line_number)));
  }
  std::array<bool, 256> present{};
  for (const std::string& piece : pieces) {
    if (piece.size() == 1) present[static_cast<uint8_t>(piece[0])] = true;
  }
  for (size_t byte = 0; byte < present.size(); ++byte) {
    if (!present[byte]) {
      return make_error(StatusCode::kCorrupt, "{}: no token for the single byte 0x{:02x}", where,
                        byte);
    }
  }
  return pieces;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> tokenizer_from_tiktoken(std::string_view ranks,
                                                           std::string_view pattern,
                                                           const TokenizerConfig& config,
                                                           std::string_view where) {
  TokenizerParts parts;
  NIBBLE_ASSIGN_OR_RETURN(parts.token_bytes, parse_ranks(ranks, where));
  VocabularyNames names(parts.token_bytes);
  BpeVocabulary vocabulary;
  vocabulary.pieces = parts.token_bytes;
  std::vector<uint32_t> order(parts.token_bytes.size());
  for (uint32_t id = 0; id < order.size(); ++id) order[id] = id;
  parts.model = BpeModel::from_ranks(std::move(vocabulary), std::move(order),
                                     {.unit = SymbolUnit::kByte, .whole_word_first = true});
  NIBBLE_ASSIGN_OR_RETURN(Regex regex, Regex::compile(pattern, where));
  parts.pre_tokenizer.add(SplitStep{.pattern = std::move(regex)});
  NIBBLE_RETURN_IF_ERROR(apply_tokenizer_config(config, names, parts));
  return Tokenizer::create(std::move(parts));
}

}  // namespace nibble
