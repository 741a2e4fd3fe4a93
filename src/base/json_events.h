#pragma once

#include <cstdint>
#include <string_view>

namespace nibble {

/// What a JSON document consists of, in its order, without a tree of it: for documents of many
/// megabytes in a form that is known. Each call returns whether to go on. Texts are valid during
/// the call.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual bool object_begin() = 0;
  virtual bool object_end() = 0;
  virtual bool array_begin() = 0;
  virtual bool array_end() = 0;
  virtual bool key(std::string_view text) = 0;
  virtual bool string(std::string_view text) = 0;
  virtual bool integer(int64_t value) = 0;
  /// Numbers that are no int64, booleans and null.
  virtual bool other() = 0;
};

/// Whether the text is one whole document, as Json::parse() reads it but for keys that appear twice
/// in an object, and no call stopped.
[[nodiscard]] bool read_json_events(std::string_view text, JsonEvents& events);

}  // namespace nibble
