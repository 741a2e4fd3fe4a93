#include "text/answer/damaged_call.h"

#include <string>

#include "base/json.h"
#include "base/log.h"

namespace nibble {

void report_damaged_call(std::string_view text) {
  constexpr size_t kShown = 80;
  std::string shown;
  append_json_string(shown, text.substr(0, kShown));
  NIBBLE_LOG(kWarning,
             "an answer has a call of a tool that is damaged and stays text, {} bytes: {}",
             text.size(), shown);
}

}  // namespace nibble
