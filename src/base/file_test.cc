#include "base/file.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/shared_file.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class File : public testing::Test {
 protected:
  File() {
    std::string pattern = testing::TempDir() + "/fileXXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~File() override { fs::remove_all(folder_); }
  [[nodiscard]] std::string path(const std::string& name) const { return folder_ + "/" + name; }
  static void put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

 private:
  std::string folder_;
};

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

TEST_F(File, ReadsTheWhole) {
  const std::string text = std::string("a\0b", 3) + std::string(100'000, 'x');
  put(path("a"), text);
  EXPECT_EQ(read_file(path("a")).value(), text);
  put(path("empty"), "");
  EXPECT_EQ(read_file(path("empty")).value(), "");
}

TEST_F(File, ErrorsNameThePath) {
  const Status missing = read_file(path("none")).status();
  EXPECT_EQ(missing.code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.message(), HasSubstr(path("none") + ": cannot open"));
  put(path("a"), "x");
  EXPECT_EQ(read_file(path("a/b")).status().code(), StatusCode::kNotFound);
  const Status folder = read_file(path("")).status();
  EXPECT_EQ(folder.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(folder.message(), HasSubstr("is a folder, but must be a regular file"));
  EXPECT_EQ(MappedFile::open(path("none")).status().code(), StatusCode::kNotFound);
}

TEST_F(File, RefusesWhatIsNoRegularFileWithoutWaiting) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  path("socket").copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  fs::create_symlink("/dev/zero", path("zero"));
  fs::create_directory(path("folder"));
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"pipe", "a pipe"}, {"socket", "a socket"}, {"zero", "a device"}, {"folder", "a folder"}};
  for (const auto& [name, kind] : cases) {
    const std::string expected = path(name) + ": is " + kind;
    for (const Status& status :
         {read_file(path(name)).status(), MappedFile::open(path(name)).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(status.message(), HasSubstr(expected));
    }
  }
  EXPECT_THAT(SharedFile::open_locked(path("pipe")).status().message(), HasSubstr("a pipe"));
  close(listener);
}

TEST_F(File, FollowsLinks) {
  put(path("a"), "hello");
  fs::create_symlink("a", path("link"));
  EXPECT_EQ(read_file(path("link")).value(), "hello");
  EXPECT_EQ(text_of(MappedFile::open(path("link")).value()), "hello");
}

TEST_F(File, NamesAndExistence) {
  EXPECT_EQ(file_name("a/b/c.json"), "c.json");
  EXPECT_EQ(file_name("c.json"), "c.json");
  EXPECT_EQ(file_name("a/"), "");
  EXPECT_FALSE(file_exists(path("a")));
  put(path("a"), "");
  EXPECT_TRUE(file_exists(path("a")));
}

TEST_F(File, MapsAndMoves) {
  put(path("a"), "hello");
  auto file = MappedFile::open(path("a"));
  ASSERT_TRUE(file.ok());
  MappedFile moved = std::move(*file);
  EXPECT_EQ(text_of(moved), "hello");
  EXPECT_EQ(moved.path(), path("a"));
  put(path("empty"), "");
  EXPECT_TRUE(MappedFile::open(path("empty"))->bytes().empty());
  moved.drop_pages(moved.bytes().subspan(1, 3));
  EXPECT_EQ(text_of(moved), "hello");
}

TEST_F(File, AMappingOutlivesReplacement) {
  put(path("a"), "old");
  const auto file = MappedFile::open(path("a"));
  put(path("b"), "new");
  fs::rename(path("b"), path("a"));
  EXPECT_EQ(text_of(*file), "old");
  EXPECT_EQ(read_file(path("a")).value(), "new");
}

TEST_F(File, WritesInOrderAndAtOffsets) {
  auto file = OutputFile::create(path("a"));
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->write("0123456789").ok());
  const std::string patch = "xy";
  ASSERT_TRUE(file->write_at(2, std::as_bytes(std::span(patch))).ok());
  ASSERT_TRUE(file->write("!").ok());
  EXPECT_EQ(file->bytes_written(), 13);
  ASSERT_TRUE(file->finish().ok());
  EXPECT_EQ(read_file(path("a")).value(), "01xy456789!");
}

TEST_F(File, NeverOverwrites) {
  put(path("a"), "kept");
  const Status status = OutputFile::create(path("a")).status();
  EXPECT_EQ(status.code(), StatusCode::kAlreadyExists);
  EXPECT_THAT(status.message(), HasSubstr(path("a")));
  EXPECT_EQ(read_file(path("a")).value(), "kept");
  EXPECT_EQ(OutputFile::create(path("none/a")).status().code(), StatusCode::kNotFound);
}

TEST_F(File, AFullDiskIsResourceExhausted) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100, 100};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    auto file = OutputFile::create(path("a"));
    const Status status = file->write(std::string(1000, 'x'));
    ::_exit(exit_code(status.code()));
  }
  int state = 0;
  ::waitpid(child, &state, 0);
  EXPECT_EQ(WEXITSTATUS(state), exit_code(StatusCode::kResourceExhausted));
}

TEST_F(File, SyncsFoldersOnly) {
  EXPECT_TRUE(sync_directory(path("")).ok());
  put(path("a"), "");
  EXPECT_EQ(sync_directory(path("a")).code(), StatusCode::kNotFound);
  EXPECT_EQ(sync_directory(path("none")).code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace nibble
