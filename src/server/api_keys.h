#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http.h"

namespace nibble {

/// A key that clients may send. Its place in the list is the client that the engine serves.
struct ApiKey {
  std::string key;
  std::string name;  // shown instead of the key
  double share = 1;  // what its requests are served in proportion to those of others
};

/// The keys that were given, called key-1, key-2 ..., and those of a file (""; none), a line each:
/// the key, then, if wanted, its name, and behind that its share, with blanks between them; lines
/// that are empty or begin with # are skipped. Empty keys among `given` do not count.
/// kInvalidArgument names the line or key at fault, without showing it; the errors of read_file().
Result<std::vector<ApiKey>> read_api_keys(const std::vector<std::string>& given,
                                          const std::string& file);

/// The place of the key that a request has, as OpenAI's clients send it or as Anthropic's do; none
/// if it has no key, or another one. Takes as long whatever is wrong with it.
[[nodiscard]] std::optional<size_t> key_place(const std::vector<ApiKey>& keys,
                                              const HttpRequest& request);

}  // namespace nibble
