#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/output_folder.h"

namespace nibble {

/// The folder "DESTINATION.partial" in which an output is built, over several runs if need be, and
/// which at last is renamed to its destination. While an existing destination is being replaced it
/// is called "DESTINATION.replacing" for a moment. Holds a lock for as long as it lives. Move-only.
class WorkFolder final {
 public:
  enum class Sharing : uint8_t { kAlone, kWithOtherParts };

  /// DESTINATION without a slash at its end. kInvalidArgument when that is no name for a folder.
  static Result<std::string> destination_of(const std::string& path);
  /// "DESTINATION.partial".
  static std::string path_of(const std::string& destination);
  /// What a replacement that was interrupted left; it exists only then.
  static std::string leftover_of(const std::string& destination);

  /// Creates or reopens the folder and locks it. kAlreadyExists when a folder of this name holds
  /// something else, kUnavailable when another process works there
  /// (alone, or in parts and this one wants to be alone).
  static Result<WorkFolder> open(const std::string& destination, Sharing sharing);
  WorkFolder(WorkFolder&& other) noexcept;
  WorkFolder& operator=(WorkFolder&&) = delete;
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  ~WorkFolder();

  [[nodiscard]] const std::string& path() const { return path_; }
  /// Names of the journals of all parts.
  [[nodiscard]] std::vector<std::string> journals() const;
  /// Removes everything that earlier runs left here. Only when alone.
  Status clear();
  /// Removes the folder itself.
  void remove();
  /// Removes journals, choice and lock, flushes the folder and renames it to the destination, in
  /// exchange with an existing one if that may be replaced.
  Status commit(ExistingOutput existing);

 private:
  WorkFolder() = default;
  Status lock(Sharing sharing);

  std::string destination_;
  std::string path_;
  int lock_ = -1;
};

/// In a work folder: what its options were chosen by, for runs that continue it; commit() removes
/// it.
inline constexpr std::string_view kChoiceName = "choice.json";

/// "journal-2-of-4.jsonl".
[[nodiscard]] std::string journal_name(int part, int parts);
/// Puts a complete folder in the place of the destination; the old one is removed.
Status exchange_folders(const std::string& folder, const std::string& destination);

}  // namespace nibble
