#include "calibration/window_states.h"

#include <filesystem>

#include <unistd.h>

namespace nibble {

Result<WindowStates> WindowStates::create(const Parts& parts, const std::string& beside) {
  const std::string path = fmt::format("{}.states-{}", beside, ::getpid());
  const auto rows = std::ssize(parts.windows.front());
  NIBBLE_ASSIGN_OR_RETURN(StateFile file,
                          StateFile::open(path, rows * parts.runner.hidden_row_bytes()));
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
  WindowStates states(parts, std::move(file));
  for (int64_t window = 0; window < std::ssize(parts.windows); ++window) {
    parts.runner.embed(parts.windows[static_cast<size_t>(window)]);
    NIBBLE_RETURN_IF_ERROR(states.file_.write(window, states.states()));
  }
  return states;
}

Status WindowStates::for_each(Inputs inputs,
                              const std::function<void(ForwardContext& context)>& work) {
  for (int64_t window = 0; window < std::ssize(parts_.windows); ++window) {
    if (parts_.stop != nullptr && *parts_.stop) {
      return make_error(StatusCode::kCancelled, "stopped");
    }
    NIBBLE_RETURN_IF_ERROR(file_.read(window, states()));
    parts_.runner.run(parts_.windows[static_cast<size_t>(window)], work);
    if (inputs == Inputs::kReplaced) {
      NIBBLE_RETURN_IF_ERROR(file_.write(window, states()));
    }
  }
  return {};
}

}  // namespace nibble
