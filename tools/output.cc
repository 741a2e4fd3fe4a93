#include "output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/file.h"

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

Status write_text_file(const std::string& path, std::string_view text) {
  const std::string partial = path + ".partial";
  std::remove(partial.c_str());  // of a run that was killed
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(partial));
  Status status = file.write(text);
  status = status.ok() ? file.finish() : status;
  if (!status.ok()) {
    std::remove(partial.c_str());
    return status;
  }
  return rename_file(partial, path);
}

}  // namespace nibble
