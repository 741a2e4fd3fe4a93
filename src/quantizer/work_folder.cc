#include "quantizer/work_folder.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWorkSuffix = ".partial";
constexpr std::string_view kReplaceSuffix = ".replacing";
constexpr std::string_view kLockName = ".lock";
constexpr std::string_view kJournalPrefix = "journal-";
constexpr std::string_view kReportFile = "quantization_report.json";  // there once all else is

Status rename_error(const std::string& from, const std::string& to) {
  const StatusCode code =
      errno == EEXIST || errno == ENOTEMPTY ? StatusCode::kAlreadyExists : StatusCode::kIo;
  return make_error(code, "{}: cannot rename to {}: {}", from, to, std::strerror(errno));
}

Status rename_new(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) != 0 &&
      (errno != EINVAL || ::rename(from.c_str(), to.c_str()) != 0)) {  // EINVAL: cannot do that
    return rename_error(from, to);
  }
  return {};
}

Status sync_parent(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  return sync_directory(parent.empty() ? "." : parent.string());
}

bool same_file(int descriptor, const std::string& path) {
  struct stat mine = {};
  struct stat there = {};
  return ::fstat(descriptor, &mine) == 0 && ::stat(path.c_str(), &there) == 0 &&
         mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

// Whether a folder of this name was made by an earlier run; an empty one can be used as well.
bool is_ours(const std::string& path) {
  std::error_code error;
  bool any = false;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name == kLockName || name == kReportFile ||
        name.substr(0, kJournalPrefix.size()) == kJournalPrefix) {
      return true;
    }
    any = true;
  }
  return !any;
}

}  // namespace

std::string journal_name(int part, int parts) {
  return fmt::format("{}{}-of-{}.jsonl", kJournalPrefix, part, parts);
}

Result<std::string> WorkFolder::destination_of(const std::string& path) {
  fs::path normal = fs::path(path).lexically_normal();
  if (!normal.has_filename()) {
    normal = normal.parent_path();  // "out/" names out
  }
  const std::string text = normal.string();
  if (text.empty() || text == "." || text == ".." || text == "/") {
    return make_error(StatusCode::kInvalidArgument, "\"{}\" is no name for a new folder", path);
  }
  return text;
}

std::string WorkFolder::path_of(const std::string& destination) {
  return destination + std::string(kWorkSuffix);
}

std::string WorkFolder::leftover_of(const std::string& destination) {
  return destination + std::string(kReplaceSuffix);
}

Result<WorkFolder> WorkFolder::open(const std::string& destination, Sharing sharing) {
  WorkFolder folder;
  folder.destination_ = destination;
  folder.path_ = path_of(destination);
  std::error_code error;
  fs::create_directories(folder.path_, error);
  if (error) {
    return make_error(StatusCode::kIo, "{}: cannot create it: {}", folder.path_, error.message());
  }
  if (!is_ours(folder.path_)) {
    return make_error(StatusCode::kAlreadyExists,
                      "{}: is needed for unfinished work, but holds something else; move it away",
                      folder.path_);
  }
  NIBBLE_RETURN_IF_ERROR(folder.lock(sharing));
  return folder;
}

WorkFolder::WorkFolder(WorkFolder&& other) noexcept
    : destination_(std::move(other.destination_)),
      path_(std::move(other.path_)),
      lock_(std::exchange(other.lock_, -1)) {}

WorkFolder::~WorkFolder() {
  if (lock_ >= 0) {
    ::close(lock_);
  }
}

Status WorkFolder::lock(Sharing sharing) {
  const std::string name = fmt::format("{}/{}", path_, kLockName);
  lock_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0) {
    return file_error(name, "create", errno);
  }
  const int kind = sharing == Sharing::kAlone ? LOCK_EX : LOCK_SH;
  // A lock on a file that its owner removed when it was done protects nothing.
  if (::flock(lock_, kind | LOCK_NB) != 0 || !same_file(lock_, name)) {
    return make_error(StatusCode::kUnavailable,
                      "{}: another nibble quantize is at work there; wait for it or stop it",
                      path_);
  }
  return {};
}

std::vector<std::string> WorkFolder::journals() const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.substr(0, kJournalPrefix.size()) == kJournalPrefix) {
      names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

Status WorkFolder::clear() {
  std::error_code error;
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename() != kLockName) {
      fs::remove_all(it->path(), error);
    }
  }
  return error ? make_error(StatusCode::kIo, "{}: cannot empty it: {}", path_, error.message())
               : Status();
}

void WorkFolder::remove() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

Status WorkFolder::commit(ExistingOutput existing) {
  std::error_code ignored;
  for (const std::string& name : journals()) {
    fs::remove(fs::path(path_) / name, ignored);
  }
  fs::remove(fs::path(path_) / kChoiceName, ignored);
  fs::remove(fs::path(path_) / kLockName, ignored);
  NIBBLE_RETURN_IF_ERROR(sync_directory(path_));
  if (!file_exists(destination_)) {
    NIBBLE_RETURN_IF_ERROR(rename_new(path_, destination_));
    return sync_parent(destination_);
  }
  if (existing == ExistingOutput::kRefuse) {
    return make_error(StatusCode::kAlreadyExists,
                      "{}: appeared meanwhile; the finished output is in {}", destination_, path_);
  }
  const std::string moving = leftover_of(destination_);
  NIBBLE_RETURN_IF_ERROR(rename_new(path_, moving));
  return exchange_folders(moving, destination_);
}

Status exchange_folders(const std::string& folder, const std::string& destination) {
  if (::renameat2(AT_FDCWD, folder.c_str(), AT_FDCWD, destination.c_str(), RENAME_EXCHANGE) != 0) {
    return rename_error(folder, destination);
  }
  NIBBLE_RETURN_IF_ERROR(sync_parent(destination));
  std::error_code ignored;
  fs::remove_all(folder, ignored);  // now the old output
  return {};
}

}  // namespace nibble
