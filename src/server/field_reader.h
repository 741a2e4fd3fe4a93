#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "server/error.h"

namespace nibble {

/// Reads typed members of a request object and keeps the first error. Absent and null members
/// leave the target as it is.
class FieldReader final {
 public:
  explicit FieldReader(const Json& object) : object_(object) {}

  void text(std::string_view key, std::string& target);
  void boolean(std::string_view key, bool& target);
  void integer(std::string_view key, int64_t low, int64_t high, int64_t& target);
  void number(std::string_view key, double low, double high, double& target);
  /// False, without an error, if the member is no array of strings.
  [[nodiscard]] bool texts(std::string_view key, std::vector<std::string>& target) const;
  void token_ids(std::string_view key, std::vector<int32_t>& target);
  /// The member if it is there and not null.
  [[nodiscard]] const Json* find(std::string_view key) const;
  /// Refuses a member that is there and not null.
  void refuse(std::string_view key, std::string_view reason);
  void fail(std::string_view key, std::string message);
  [[nodiscard]] const std::optional<ApiError>& error() const { return error_; }

 private:
  void wrong_type(std::string_view key, std::string_view expected, const Json& got);

  const Json& object_;
  std::optional<ApiError> error_;
};

}  // namespace nibble
