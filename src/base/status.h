#pragma once

#include <optional>
#include <string>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"

namespace nibble {

/// What kind of failure the world handed us. Each maps to one process exit code and one HTTP
/// status.
enum class StatusCode {
  kOk,
  kInvalidArgument,    // a flag, request field or prompt that cannot be served
  kNotFound,           // a file, tensor or model that does not exist
  kCorrupt,            // a file that contradicts its format
  kUnsupported,        // well formed, but not something this build can run
  kAlreadyExists,      // an output that would be overwritten
  kResourceExhausted,  // memory, disk, pages or queue slots
  kIo,                 // the operating system refused
  kUnavailable,        // shutting down, or not ready
  kCancelled,          // the caller went away
};

/// Outcome of an operation that can fail because of files, configs, requests, memory or network.
/// A broken precondition is not a Status: see base/check.h.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const { return code_ == StatusCode::kOk; }
  [[nodiscard]] StatusCode code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }

  /// The same failure with "where" put in front: "shard 3: tensor x: ...".
  [[nodiscard]] Status with_context(std::string_view where) const {
    return ok() ? *this : Status(code_, fmt::format("{}: {}", where, message_));
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// Process exit code of a failure: 2 invalid argument, 3 not found, 4 corrupt, 5 unsupported,
/// 6 already exists, 7 resource exhausted, 8 I/O, 9 unavailable, 10 cancelled; 70 is an internal
/// error.
[[nodiscard]] int exit_code(StatusCode code);
[[nodiscard]] std::string_view to_string(StatusCode code);

template <typename... Args>
[[nodiscard]] Status make_error(StatusCode code,
                                fmt::format_string<Args...> format,
                                Args&&... args) {
  return Status(code, fmt::format(format, std::forward<Args>(args)...));
}

/// A value or the Status that explains its absence.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    CHECK(!status_.ok());
  }

  [[nodiscard]] bool ok() const { return status_.ok(); }
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] T& value() & {
    CHECK_MSG(ok(), "value() of a failed Result: {}", status_.message());
    return *value_;
  }
  [[nodiscard]] const T& value() const& {
    CHECK_MSG(ok(), "value() of a failed Result: {}", status_.message());
    return *value_;
  }
  [[nodiscard]] T value() && {
    CHECK_MSG(ok(), "value() of a failed Result: {}", status_.message());
    return std::move(*value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace nibble

/// Returns the failure of `expr` to the caller; continues otherwise.
#define NIBBLE_RETURN_IF_ERROR(expr)                        \
  do {                                                      \
    if (auto nibble_status = (expr); !nibble_status.ok()) { \
      return nibble_status;                                 \
    }                                                       \
  } while (false)

#define NIBBLE_CONCAT_INNER(a, b) a##b
#define NIBBLE_CONCAT(a, b) NIBBLE_CONCAT_INNER(a, b)
#define NIBBLE_ASSIGN_INNER(result, target, expr) \
  auto result = (expr);                           \
  if (!result.ok()) {                             \
    return result.status();                       \
  }                                               \
  target = std::move(result).value()

/// `NIBBLE_ASSIGN_OR_RETURN(auto x, f());` binds the value or returns the failure.
#define NIBBLE_ASSIGN_OR_RETURN(target, expr) \
  NIBBLE_ASSIGN_INNER(NIBBLE_CONCAT(nibble_result_, __LINE__), target, expr)
