#include "base/check.h"

#include <string_view>

namespace nibble {
namespace {

/// "src/base/file.cc" of "/some/folder/src/base/file.cc": messages do not say where the program
/// was built.
std::string_view from_root(std::string_view file) {
  for (const std::string_view folder : {"/src/", "/tools/"}) {
    if (const size_t at = file.rfind(folder); at != std::string_view::npos) {
      return file.substr(at + 1);
    }
  }
  return file;
}

}  // namespace

void throw_internal_error(const char* file, int line, const std::string& what) {
  throw InternalError(fmt::format("internal error at {}:{}: {}", from_root(file), line, what));
}

}  // namespace nibble
