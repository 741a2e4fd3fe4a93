#pragma once

#include <ctime>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/jinja/dict.h"
#include "text/jinja/value.h"

namespace nibble::jinja {

/// Bounds of one render, so that a hostile template ends soon. Derived, not measured: a long
/// conversation (10,000 messages) needs below 1% of the work.
struct Limits {
  uint64_t work = uint64_t{1} << 29;           // units: about one byte copied or 1/32 of a node
  uint64_t output_bytes = uint64_t{64} << 20;  // rendered text
  int depth = 600;                             // nested nodes and calls under evaluation
};

constexpr uint64_t kNodeWork = 32;     // evaluating one node of the tree
constexpr uint64_t kObjectWork = 128;  // one list, dict, callable or scope
constexpr uint64_t kItemWork = 64;     // one element put into a container

/// Variables of the template, a loop, a macro call or a block.
struct Scope {
  Scope* parent = nullptr;
  std::map<std::string, Value, std::less<>> variables;
};

/// What one render owns: containers, scopes and callables (freed together at its end, whatever
/// cycles they form), the work counter, and the clock. Not shared between threads.
class Runtime final {
 public:
  explicit Runtime(Limits limits) : limits_(limits) {}
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// Counts work done. Errors: kInvalidArgument once the limit is passed.
  Status charge(uint64_t units);
  [[nodiscard]] const Limits& limits() const { return limits_; }

  // Each charges for what it makes.
  Result<Value> string(std::string text);
  Result<Value> list(std::vector<Value> items);
  Result<Value> tuple(std::vector<Value> items);
  Result<Value> dict();
  Result<Value> space();
  Result<Value> callable(std::string name,
                         std::function<Result<Value>(Runtime&, Arguments&)> invoke);
  Result<Loop*> loop();
  Result<Scope*> scope(Scope* parent);
  /// A value from JSON; objects become dicts, arrays lists.
  Result<Value> from_json(const Json& json);

  /// Local time that strftime_now shows; set before rendering.
  std::tm now{};
  /// Set once the error message names its line, so that outer nodes do not add theirs.
  bool error_is_located = false;
  /// Set when the template itself refused (raise_exception): its message stays as it is.
  bool is_refused = false;

 private:
  Limits limits_;
  uint64_t work_ = 0;
  std::deque<List> lists_;
  std::deque<Tuple> tuples_;
  std::deque<Dict> dicts_;
  std::deque<Namespace> spaces_;
  std::deque<Callable> callables_;
  std::deque<Loop> loops_;
  std::deque<Scope> scopes_;
};

/// Error of a template at run time.
template <typename... Args>
[[nodiscard]] Status template_error(fmt::format_string<Args...> format, Args&&... args) {
  return make_error(StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

/// Declares what a function accepts: names in order, the first `required` of them obligatory.
struct Signature {
  std::string_view function;
  std::vector<std::string_view> parameters;
  size_t required = 0;
};

/// One value per parameter, in order; an undefined value where none was given.
/// Errors: kInvalidArgument for too many, unknown, doubled or missing arguments.
Result<std::vector<Value>> bind(const Signature& signature, const Arguments& arguments);
/// An integral argument as int64, or `fallback` when it is undefined or none.
Result<int64_t> integer_argument(const Value& value, int64_t fallback, std::string_view what);

}  // namespace nibble::jinja
