// The only file that includes the JSON library: its event parser fills our own value type, which
// lets us refuse duplicate keys and non-finite numbers and avoids a second tree in memory.
#include <cmath>
#include <unordered_set>
#include <vector>

#include <boost/json/basic_parser_impl.hpp>

#include "base/json.h"

namespace nibble {
namespace {

class TreeBuilder final {
 public:
  // NOLINTBEGIN(readability-identifier-naming): names that the parser uses
  static constexpr size_t max_object_size = static_cast<size_t>(-1);
  static constexpr size_t max_array_size = static_cast<size_t>(-1);
  static constexpr size_t max_key_size = static_cast<size_t>(-1);
  static constexpr size_t max_string_size = static_cast<size_t>(-1);
  using Error = boost::json::error_code;
  using Text = boost::json::string_view;

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) { return open(Json(JsonObject())); }
  bool on_object_end(size_t, Error&) { return close(); }
  bool on_array_begin(Error&) { return open(Json(JsonArray())); }
  bool on_array_end(size_t, Error&) { return close(); }
  bool on_key_part(Text part, size_t, Error&) { return append(part); }
  bool on_key(Text part, size_t, Error& error) {
    append(part);
    if (!stack_.back().keys.insert(text_).second) {
      duplicate_ = text_;
      error = boost::json::make_error_code(boost::json::error::exception);
      return false;
    }
    stack_.back().key = std::move(text_);
    text_.clear();
    return true;
  }
  bool on_string_part(Text part, size_t, Error&) { return append(part); }
  bool on_string(Text part, size_t, Error&) {
    append(part);
    std::string value = std::move(text_);
    text_.clear();
    return add(Json(std::move(value)));
  }
  bool on_number_part(Text, Error&) { return true; }
  bool on_int64(int64_t value, Text, Error&) { return add(Json(value)); }
  bool on_uint64(uint64_t value, Text, Error&) { return add(Json(value)); }
  bool on_double(double value, Text, Error& error) {
    if (!std::isfinite(value)) {
      error = boost::json::make_error_code(boost::json::error::exponent_overflow);
      return false;
    }
    return add(Json(value));
  }
  bool on_bool(bool value, Error&) { return add(Json(value)); }
  bool on_null(Error&) { return add(Json()); }
  bool on_comment_part(Text, Error&) { return true; }
  bool on_comment(Text, Error&) { return true; }
  // NOLINTEND(readability-identifier-naming)

  [[nodiscard]] const std::string& duplicate() const { return duplicate_; }
  Json take() { return std::move(root_); }

 private:
  struct Open {
    Json value;
    std::string key;
    // Looking a key up in a growing object would rebuild its index each time.
    std::unordered_set<std::string> keys = {};
  };

  bool append(Text part) {
    text_.append(part.data(), part.size());
    return true;
  }
  bool open(Json value) {
    stack_.push_back({std::move(value), {}, {}});
    return true;
  }
  bool close() {
    Json done = std::move(stack_.back().value);
    stack_.pop_back();
    return add(std::move(done));
  }
  bool add(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
    } else if (stack_.back().value.is_array()) {
      stack_.back().value.as_array().push_back(std::move(value));
    } else {
      stack_.back().value.as_object().append(std::move(stack_.back().key), std::move(value));
    }
    return true;
  }

  std::vector<Open> stack_;
  std::string text_;
  std::string duplicate_;
  Json root_;
};

}  // namespace

Result<Json> Json::parse(std::string_view text) {
  boost::json::parse_options options;
  options.max_depth = 256;
  boost::json::basic_parser<TreeBuilder> parser(options);
  boost::json::error_code error;
  const size_t used = parser.write_some(false, text.data(), text.size(), error);
  if (!parser.handler().duplicate().empty()) {
    return make_error(StatusCode::kCorrupt,
                      "JSON: key \"{}\" appears twice in one object (byte {})",
                      parser.handler().duplicate(), used);
  }
  if (error) {
    return make_error(StatusCode::kCorrupt, "JSON: {} at byte {}", error.message(), used);
  }
  if (text.find_first_not_of(" \t\r\n", used) != std::string_view::npos) {
    return make_error(StatusCode::kCorrupt, "JSON: text after the value at byte {}", used);
  }
  return parser.handler().take();
}

}  // namespace nibble
