#include "server/api_keys.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <string_view>

#include <fmt/format.h>
#include <strings.h>

#include "base/file.h"

namespace nibble {
namespace {

constexpr double kLeastShare = 0.001;
constexpr double kMostShare = 1000;

/// Compares in a time that does not depend on where the texts differ.
bool equal_secret(std::string_view given, std::string_view wanted) {
  unsigned difference = given.size() == wanted.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i] ^ wanted[i % wanted.size()]);
  }
  return difference == 0;
}

std::string_view key_of(const HttpRequest& request) {
  constexpr std::string_view kBearer = "Bearer ";
  const std::string_view header = request.header("Authorization");
  const bool bearer = header.size() >= kBearer.size() &&
                      strncasecmp(header.data(), kBearer.data(), kBearer.size()) == 0;
  return bearer ? header.substr(kBearer.size()) : request.header("x-api-key");
}

Status invalid(const std::string& where, std::string_view what) {
  return make_error(StatusCode::kInvalidArgument, "{}: {}", where, what);
}

/// Adds a key whose text, name and share must be as said, and unlike those before.
Status add_key(ApiKey key, const std::string& where, std::vector<ApiKey>& keys) {
  const auto is_printable = [](char c) { return c > ' ' && c <= '~'; };
  if (!std::ranges::all_of(key.key, is_printable)) {
    return invalid(where, "a key must be printable ASCII without blanks, as it comes in a header");
  }
  if (!std::ranges::all_of(key.name, is_printable)) {
    return invalid(where, "a name must be printable ASCII");
  }
  for (const ApiKey& other : keys) {
    if (other.key == key.key) {
      return invalid(where, fmt::format("this key is that of {} already", other.name));
    }
    if (other.name == key.name) {
      return invalid(where, fmt::format("the name {} is taken already", key.name));
    }
  }
  keys.push_back(std::move(key));
  return {};
}

Status read_line(const std::string& line, const std::string& where, std::vector<ApiKey>& keys) {
  std::istringstream words(line);
  ApiKey key;
  words >> key.key;
  if (key.key.empty() || key.key.starts_with('#')) {
    return {};
  }
  std::string share;
  std::string more;
  words >> key.name >> share >> more;
  if (key.name.empty()) {
    key.name = fmt::format("key-{}", keys.size() + 1);
  }
  if (!share.empty()) {
    const char* const end = share.data() + share.size();
    const auto [stop, error] = std::from_chars(share.data(), end, key.share);
    if (error != std::errc() || stop != end ||
        !(key.share >= kLeastShare && key.share <= kMostShare)) {
      return invalid(where, fmt::format("behind the name stands a share, a number from {} to {}",
                                        kLeastShare, kMostShare));
    }
  }
  if (!more.empty()) {
    return invalid(where, "a line is a key, a name and a share, without blanks in them");
  }
  return add_key(std::move(key), where, keys);
}

}  // namespace

Result<std::vector<ApiKey>> read_api_keys(const std::vector<std::string>& given,
                                          const std::string& file) {
  std::vector<ApiKey> keys;
  for (const std::string& key : given) {
    if (!key.empty()) {
      NIBBLE_RETURN_IF_ERROR(
          add_key({.key = key, .name = fmt::format("key-{}", keys.size() + 1)}, "--api-key", keys));
    }
  }
  if (file.empty()) {
    return keys;
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(file));
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    NIBBLE_RETURN_IF_ERROR(
        read_line(line, fmt::format("--api-key-file {}, line {}", file, number), keys));
  }
  if (keys.empty()) {
    return invalid("--api-key-file " + file, "there is no key in it");
  }
  return keys;
}

std::optional<size_t> key_place(const std::vector<ApiKey>& keys, const HttpRequest& request) {
  const std::string_view given = key_of(request);
  std::optional<size_t> found;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (equal_secret(given, keys[i].key)) {
      found = i;
    }
  }
  return found;
}

}  // namespace nibble
