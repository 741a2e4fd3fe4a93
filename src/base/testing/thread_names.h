#pragma once

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <system_error>

namespace nibble {

/// The names of all threads of this process, as the system has them.
inline std::multiset<std::string> thread_names() {
  std::multiset<std::string> names;
  std::error_code ignored;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    if (std::getline(file, name)) {  // else it has just ended
      names.insert(name);
    }
  }
  return names;
}

}  // namespace nibble
