#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "calibration/layer_runner.h"
#include "calibration/state_file.h"

namespace nibble {

/// The hidden states of all windows of a text on their way through a model that is run layer by
/// layer in one go: in a file that has no name any more and goes with the process.
class WindowStates final {
 public:
  struct Parts {
    LayerRunner& runner;
    const std::vector<std::vector<int32_t>>& windows;
    const std::atomic<bool>* stop = nullptr;  // may become true at any time
  };
  /// What becomes of a window's states after some work on them.
  enum class Inputs : uint8_t { kKept, kReplaced };

  /// Embeds all windows. beside: where the file is made, with a suffix of the process.
  static Result<WindowStates> create(const Parts& parts, const std::string& beside);

  /// Runs work on one window after the other; LayerRunner::hidden() has its states. kReplaced: by
  /// what work makes of them. kCancelled when stopped.
  Status for_each(Inputs inputs, const std::function<void(ForwardContext& context)>& work);

 private:
  WindowStates(const Parts& parts, StateFile file) : parts_(parts), file_(std::move(file)) {}
  [[nodiscard]] std::span<std::byte> states() const {
    return parts_.runner.hidden_rows(std::ssize(parts_.windows.front()));
  }

  Parts parts_;
  StateFile file_;
};

}  // namespace nibble
