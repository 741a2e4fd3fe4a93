#pragma once

#include <string_view>

namespace nibble {

/// Names the calling thread, for debuggers, `top -H` and /proc/PID/task/TID/comm. Longer names are
/// cut to the 15 bytes that the system keeps.
void name_thread(std::string_view name);
/// The same for one of several: "pool-3".
void name_thread(std::string_view name, int number);

}  // namespace nibble
