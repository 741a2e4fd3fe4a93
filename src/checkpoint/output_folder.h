#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace nibble {

enum class ExistingOutput : uint8_t { kRefuse, kReplace };

/// A folder that appears at its destination whole or not at all. It is filled under
/// "DESTINATION.tmp-<pid>"; an object that dies uncommitted removes that again, and a new one
/// removes what killed processes left. Move-only.
class OutputFolder final {
 public:
  /// kAlreadyExists when the destination is there and must not be replaced.
  static Result<OutputFolder> create(const std::string& destination, ExistingOutput existing);
  OutputFolder(OutputFolder&& other) noexcept;
  OutputFolder& operator=(OutputFolder&&) = delete;
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder();

  /// Where to write.
  [[nodiscard]] const std::string& path() const { return temporary_; }
  /// Flushes the folder and renames it to the destination, exchanging it with an existing one.
  Status commit();

 private:
  OutputFolder() = default;

  std::string destination_;
  std::string temporary_;  // empty after commit
  ExistingOutput existing_ = ExistingOutput::kRefuse;
};

}  // namespace nibble
