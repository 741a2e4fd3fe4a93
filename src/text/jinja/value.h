#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace nibble::jinja {

/// Python integers have no bound; 128 bits hold every JSON integer and show overflow exactly.
__extension__ using Integer = __int128;

class Dict;
class Runtime;
class Value;
struct Arguments;
struct Callable;
struct Loop;

struct List {
  std::vector<Value> items;
};
struct Tuple {
  std::vector<Value> items;
};
struct Namespace {
  Dict* members = nullptr;
};

/// A value of a template. Containers are shared and mutable as in Python; the Runtime of a render
/// owns them, so a Value must not outlive its Runtime.
class Value final {
 public:
  // The order of alternatives of data_.
  enum class Kind {
    kUndefined,
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kList,
    kTuple,
    kDict,
    kNamespace,
    kLoop,
    kCallable,
  };

  Value() = default;
  /// An undefined value; `why` is the error for those who use it ("'x' is undefined").
  static Value undefined(std::string why);
  static Value none() { return Value(None{}); }
  static Value boolean(bool value) { return Value(value); }
  static Value integer(Integer value) { return Value(value); }
  static Value real(double value) { return Value(value); }
  static Value string(std::string text);
  static Value list(List* list) { return Value(list); }
  static Value tuple(Tuple* tuple) { return Value(tuple); }
  static Value dict(Dict* dict) { return Value(dict); }
  static Value space(Namespace* space) { return Value(space); }
  static Value loop(Loop* loop) { return Value(loop); }
  static Value callable(Callable* callable) { return Value(callable); }

  [[nodiscard]] Kind kind() const { return static_cast<Kind>(data_.index()); }
  [[nodiscard]] bool is(Kind kind) const { return this->kind() == kind; }
  [[nodiscard]] bool is_undefined() const { return is(Kind::kUndefined); }
  [[nodiscard]] bool is_none() const { return is(Kind::kNone); }
  [[nodiscard]] bool is_string() const { return is(Kind::kString); }
  /// Integers and booleans, which count as 0 and 1.
  [[nodiscard]] bool is_integral() const { return is(Kind::kInt) || is(Kind::kBool); }
  [[nodiscard]] bool is_number() const { return is_integral() || is(Kind::kFloat); }

  // Each requires the matching kind.
  [[nodiscard]] bool as_bool() const { return std::get<bool>(data_); }
  [[nodiscard]] Integer as_integer() const;  // also of booleans
  [[nodiscard]] double as_double() const;    // of any number
  [[nodiscard]] const std::string& as_string() const { return *std::get<Text>(data_); }
  [[nodiscard]] List* as_list() const { return std::get<List*>(data_); }
  [[nodiscard]] Dict* as_dict() const { return std::get<Dict*>(data_); }
  [[nodiscard]] Namespace* as_namespace() const { return std::get<Namespace*>(data_); }
  [[nodiscard]] Loop* as_loop() const { return std::get<Loop*>(data_); }
  [[nodiscard]] Callable* as_callable() const { return std::get<Callable*>(data_); }
  /// Items of a list or tuple, nullptr for other kinds.
  [[nodiscard]] std::vector<Value>* items() const;
  /// Why an undefined value is undefined.
  [[nodiscard]] std::string why_undefined() const;
  /// The same object (Python's `is`).
  [[nodiscard]] bool same_as(const Value& other) const;
  /// Python's name of the type: "int", "str", "dict", ...
  [[nodiscard]] std::string_view type_name() const;
  [[nodiscard]] bool truthy() const;

 private:
  using Text = std::shared_ptr<const std::string>;
  struct Undefined {
    Text why;
    bool operator==(const Undefined&) const { return true; }
  };
  struct None {
    bool operator==(const None&) const { return true; }
  };
  using Data = std::variant<Undefined,
                            None,
                            bool,
                            Integer,
                            double,
                            Text,
                            List*,
                            Tuple*,
                            Dict*,
                            Namespace*,
                            Loop*,
                            Callable*>;

  template <typename T>
  explicit Value(T data) : data_(std::move(data)) {}

  Data data_;
};

/// Arguments of a call of a macro, function, method, filter or test.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// Anything a template can call.
struct Callable {
  std::string name;
  std::function<Result<Value>(Runtime&, Arguments&)> invoke;
};

/// What `loop` shows inside a for.
struct Loop {
  std::vector<Value> items;
  size_t index = 0;  // from 0
  size_t depth = 0;  // of recursion, from 0
  bool has_changed_value = false;
  std::vector<Value> changed_value;                            // last arguments of loop.changed()
  std::function<Result<Value>(Runtime&, Arguments&)> recurse;  // empty unless recursive
};

}  // namespace nibble::jinja
