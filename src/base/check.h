#pragma once

#include <stdexcept>
#include <string>

#include <fmt/core.h>

namespace nibble {

/// A broken precondition: our own mistake, never the user's. Caught only by the engine loop, the
/// route wrapper and main (exit code 70).
class InternalError final : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] void throw_internal_error(const char* file, int line, const std::string& what);

}  // namespace nibble

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) [[unlikely]] {                                  \
      ::nibble::throw_internal_error(__FILE__, __LINE__, #condition); \
    }                                                                 \
  } while (false)

/// CHECK with a formatted explanation.
#define CHECK_MSG(condition, ...)                                                   \
  do {                                                                              \
    if (!(condition)) [[unlikely]] {                                                \
      ::nibble::throw_internal_error(__FILE__, __LINE__,                            \
                                     #condition ": " + ::fmt::format(__VA_ARGS__)); \
    }                                                                               \
  } while (false)

#define NIBBLE_CHECK_OP(a, op, b) CHECK_MSG((a)op(b), "{} " #op " {} does not hold", (a), (b))
#define CHECK_EQ(a, b) NIBBLE_CHECK_OP(a, ==, b)
#define CHECK_NE(a, b) NIBBLE_CHECK_OP(a, !=, b)
#define CHECK_LE(a, b) NIBBLE_CHECK_OP(a, <=, b)
#define CHECK_LT(a, b) NIBBLE_CHECK_OP(a, <, b)
#define CHECK_GE(a, b) NIBBLE_CHECK_OP(a, >=, b)
#define CHECK_GT(a, b) NIBBLE_CHECK_OP(a, >, b)
