#include "output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace nibble {

void print_out(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

Status flush_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) {
    return {};
  }
  const int error = errno;
  return make_error(error == ENOSPC ? StatusCode::kResourceExhausted : StatusCode::kIo,
                    "cannot write the result to standard output{}{}", error == 0 ? "" : ": ",
                    error == 0 ? "" : std::strerror(error));
}

}  // namespace nibble
