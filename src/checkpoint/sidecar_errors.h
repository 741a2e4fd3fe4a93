#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// How the readers of a kind of sidecar refuse files: with what to do about it.
class SidecarErrors final {
 public:
  explicit constexpr SidecarErrors(std::string_view remedy) : remedy_(remedy) {}

  /// kCorrupt.
  [[nodiscard]] Status bad_field(const std::string& where,
                                 std::string_view field,
                                 const std::string& what) const {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {}; {}", where, field, what, remedy_);
  }
  /// Adds the remedy to what readers of JSON and of tensors say, who do not know it.
  [[nodiscard]] Status with_remedy(const Status& status) const {
    return status.ok() || status.message().ends_with(remedy_)
               ? status
               : make_error(status.code(), "{}; {}", status.message(), remedy_);
  }

 private:
  std::string_view remedy_;
};

}  // namespace nibble
