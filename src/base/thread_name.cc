#include "base/thread_name.h"

#include <string>

#include <fmt/format.h>
#include <pthread.h>

namespace nibble {
namespace {

constexpr size_t kLongest = 15;

}  // namespace

void name_thread(std::string_view name) {
  const std::string text(name.substr(0, kLongest));
  pthread_setname_np(pthread_self(), text.c_str());
}

void name_thread(std::string_view name, int number) {
  const std::string digits = fmt::format("-{}", number);
  name_thread(fmt::format("{}{}", name.substr(0, kLongest - digits.size()), digits));
}

}  // namespace nibble
