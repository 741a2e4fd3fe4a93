#include "checkpoint/output_folder.h"

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporaryMark = ".tmp-";

// The process that made a folder of this name for the destination; empty if it is none of ours.
std::optional<pid_t> maker_of(std::string_view name, std::string_view destination_name) {
  if (name.substr(0, destination_name.size()) != destination_name) {
    return std::nullopt;
  }
  name.remove_prefix(destination_name.size());
  if (name.substr(0, kTemporaryMark.size()) != kTemporaryMark) {
    return std::nullopt;
  }
  name.remove_prefix(kTemporaryMark.size());
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
  const bool valid = error == std::errc() && end == name.data() + name.size() && pid > 0;
  return valid ? std::optional(pid) : std::nullopt;
}

void remove_leftovers(const fs::path& parent, const std::string& destination_name) {
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const auto pid = maker_of(name, destination_name);
    const bool dead = pid && (*pid == ::getpid() || (::kill(*pid, 0) != 0 && errno == ESRCH));
    if (dead) {
      NIBBLE_LOG(kWarning, "removing {}, left by an interrupted run", name);
      std::error_code ignored;
      fs::remove_all(it->path(), ignored);
    }
  }
}

Status rename_error(const std::string& from, const std::string& to) {
  const StatusCode code =
      errno == EEXIST || errno == ENOTEMPTY ? StatusCode::kAlreadyExists : StatusCode::kIo;
  return make_error(code, "{}: cannot rename to {}: {}", from, to, std::strerror(errno));
}

}  // namespace

Result<OutputFolder> OutputFolder::create(const std::string& destination, ExistingOutput existing) {
  OutputFolder folder;
  fs::path path = fs::path(destination).lexically_normal();
  if (!path.has_filename()) {
    path = path.parent_path();  // "out/" names out
  }
  folder.destination_ = path.string();
  folder.existing_ = existing;
  if (folder.destination_.empty() || folder.destination_ == "." || folder.destination_ == "/") {
    return make_error(StatusCode::kInvalidArgument, "\"{}\" is no name for a new folder",
                      destination);
  }
  if (existing == ExistingOutput::kRefuse && file_exists(folder.destination_)) {
    return make_error(StatusCode::kAlreadyExists,
                      "{}: exists already; choose another name or give --force to replace it",
                      folder.destination_);
  }
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  fs::create_directories(parent, error);
  if (!error) {
    remove_leftovers(parent, path.filename().string());
    const std::string temporary =
        fmt::format("{}{}{}", folder.destination_, kTemporaryMark, ::getpid());
    fs::create_directory(temporary, error);
    folder.temporary_ = temporary;
  }
  if (error) {
    folder.temporary_.clear();
    return make_error(StatusCode::kIo, "{}: cannot create it: {}", folder.destination_,
                      error.message());
  }
  return folder;
}

OutputFolder::OutputFolder(OutputFolder&& other) noexcept
    : destination_(std::move(other.destination_)),
      temporary_(std::exchange(other.temporary_, {})),
      existing_(other.existing_) {}

OutputFolder::~OutputFolder() {
  if (!temporary_.empty()) {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
  }
}

Status OutputFolder::commit() {
  NIBBLE_RETURN_IF_ERROR(sync_directory(temporary_));
  const char* from = temporary_.c_str();
  const char* to = destination_.c_str();
  if (existing_ == ExistingOutput::kReplace && file_exists(destination_)) {
    if (::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) != 0) {
      return rename_error(temporary_, destination_);
    }
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);  // now the old output
  } else if (::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) != 0 &&
             (errno != EINVAL || ::rename(from, to) != 0)) {  // EINVAL: the file system cannot
    return rename_error(temporary_, destination_);
  }
  temporary_.clear();
  const fs::path parent = fs::path(destination_).parent_path();
  return sync_directory(parent.empty() ? "." : parent.string());
}

}  // namespace nibble
