// The only file that includes the JSON library: its event parser fills our own value type, which
// lets us refuse duplicate keys and non-finite numbers and avoids a second tree in memory.
#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <vector>

#include <boost/json/basic_parser_impl.hpp>

#include "base/json.h"
#include "base/json_events.h"

namespace nibble {
namespace {

/// What the parser wants of every receiver of its events, however it uses them.
class ParserEvents {
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
  bool on_key_part(Text part, size_t, Error&) { return append(part); }
  bool on_string_part(Text part, size_t, Error&) { return append(part); }
  bool on_number_part(Text, Error&) { return true; }
  bool on_comment_part(Text, Error&) { return true; }
  bool on_comment(Text, Error&) { return true; }
  // NOLINTEND(readability-identifier-naming)

 protected:
  bool append(Text part) {
    text_.append(part.data(), part.size());
    return true;
  }

  std::string text_;  // of the key or string so far
};

class TreeBuilder final : public ParserEvents {
 public:
  // NOLINTBEGIN(readability-identifier-naming): names that the parser uses
  bool on_object_begin(Error&) { return open(Json(JsonObject())); }
  bool on_object_end(size_t, Error&) { return close(); }
  bool on_array_begin(Error&) { return open(Json(JsonArray())); }
  bool on_array_end(size_t, Error&) { return close(); }
  bool on_key(Text part, size_t, Error& error) {
    append(part);
    if (!is_new_key()) {
      duplicate_ = text_;
      error = boost::json::make_error_code(boost::json::error::exception);
      return false;
    }
    stack_.back().key = std::move(text_);
    text_.clear();
    return true;
  }
  bool on_string(Text part, size_t, Error&) {
    append(part);
    std::string value = std::move(text_);
    text_.clear();
    return add(Json(std::move(value)));
  }
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
  // NOLINTEND(readability-identifier-naming)

  [[nodiscard]] const std::string& duplicate() const { return duplicate_; }
  Json take() { return std::move(root_); }

 private:
  struct Open {
    Json value;
    std::string key;
    // Of large objects: looking a key up in a growing one would rebuild its index each time.
    std::unordered_set<std::string> keys = {};
  };

  // Whether text_ is no key of the innermost object. Most objects are small, headers of checkpoints
  // have 200,000 of them.
  bool is_new_key() {
    constexpr size_t kSmall = 8;
    Open& open = stack_.back();
    const JsonObject& object = open.value.as_object();
    if (object.size() < kSmall) {
      return std::none_of(object.begin(), object.end(),
                          [&](const JsonObject::Member& member) { return member.first == text_; });
    }
    if (open.keys.empty()) {
      for (const auto& [key, value] : object) {
        open.keys.insert(key);
      }
    }
    return open.keys.insert(text_).second;
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
  std::string duplicate_;
  Json root_;
};

/// Hands events on; texts in several parts are joined first.
class EventSender final : public ParserEvents {
 public:
  // NOLINTBEGIN(readability-identifier-naming): names that the parser uses
  explicit EventSender(JsonEvents& events) : events_(events) {}

  bool on_object_begin(Error& error) { return goes_on(events_.object_begin(), error); }
  bool on_object_end(size_t, Error& error) { return goes_on(events_.object_end(), error); }
  bool on_array_begin(Error& error) { return goes_on(events_.array_begin(), error); }
  bool on_array_end(size_t, Error& error) { return goes_on(events_.array_end(), error); }
  bool on_key(Text part, size_t, Error& error) { return goes_on(events_.key(whole(part)), error); }
  bool on_string(Text part, size_t, Error& error) {
    return goes_on(events_.string(whole(part)), error);
  }
  bool on_int64(int64_t value, Text, Error& error) {
    return goes_on(events_.integer(value), error);
  }
  bool on_uint64(uint64_t, Text, Error& error) { return goes_on(events_.other(), error); }
  bool on_double(double, Text, Error& error) { return goes_on(events_.other(), error); }
  bool on_bool(bool, Error& error) { return goes_on(events_.other(), error); }
  bool on_null(Error& error) { return goes_on(events_.other(), error); }
  // NOLINTEND(readability-identifier-naming)

 private:
  static bool goes_on(bool yes, Error& error) {
    if (!yes) {
      error = boost::json::make_error_code(boost::json::error::exception);
    }
    return yes;
  }
  std::string_view whole(Text last) {
    if (text_.empty()) {
      return {last.data(), last.size()};
    }
    append(last);
    joined_ = std::move(text_);
    text_.clear();
    return joined_;
  }

  JsonEvents& events_;
  std::string joined_;
};

boost::json::parse_options parser_options() {
  boost::json::parse_options options;
  options.max_depth = 256;
  return options;
}

bool ends_at(std::string_view text, size_t end) {
  return text.find_first_not_of(" \t\r\n", end) == std::string_view::npos;
}

}  // namespace

bool read_json_events(std::string_view text, JsonEvents& events) {
  boost::json::basic_parser<EventSender> parser(parser_options(), events);
  boost::json::error_code error;
  const size_t used = parser.write_some(false, text.data(), text.size(), error);
  return !error && ends_at(text, used);
}

Result<Json> Json::parse(std::string_view text) {
  boost::json::basic_parser<TreeBuilder> parser(parser_options());
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
  if (!ends_at(text, used)) {
    return make_error(StatusCode::kCorrupt, "JSON: text after the value at byte {}", used);
  }
  return parser.handler().take();
}

}  // namespace nibble
