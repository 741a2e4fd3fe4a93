#include "base/status.h"

namespace nibble {

int exit_code(StatusCode code) { return code == StatusCode::kOk ? 0 : static_cast<int>(code) + 1; }

std::string_view to_string(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kNotFound:
      return "not found";
    case StatusCode::kCorrupt:
      return "corrupt";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kAlreadyExists:
      return "already exists";
    case StatusCode::kResourceExhausted:
      return "resource exhausted";
    case StatusCode::kIo:
      return "i/o error";
    case StatusCode::kUnavailable:
      return "unavailable";
    case StatusCode::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

}  // namespace nibble
