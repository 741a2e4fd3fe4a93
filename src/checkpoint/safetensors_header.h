#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace nibble {

/// A tensor of a header before its bytes are found.
struct HeaderEntry {
  TensorInfo tensor;
  int64_t begin = 0;  // of its bytes, from the end of the header
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<HeaderEntry> entries;  // in the order of the text
  std::map<std::string, std::string> metadata;
};

/// A header in the form that all writers give it, without a tree of its 200,000 objects: every
/// entry has known dtype, shape and offsets that agree, and nothing else. Nothing for any other
/// text: Json::parse() then finds what is wrong, if anything.
[[nodiscard]] std::optional<SafetensorsHeader> read_usual_header(std::string_view text);

}  // namespace nibble
