#pragma once

#include <string_view>

namespace nibble {

/// Says in the log that a text that is marked as a call is none, and shows the beginning of it.
void report_damaged_call(std::string_view text);

}  // namespace nibble
