#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// Writes a result to standard output. A failure shows in flush_output().
void print_out(std::string_view text);
/// Writes what is still buffered. kResourceExhausted or kIo when standard output took less than
/// everything.
Status flush_output();

/// Writes a file, which appears under its name when it is whole and replaces one that is there.
Status write_text_file(const std::string& path, std::string_view text);

}  // namespace nibble
