#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/shared_file.h"
#include "base/status.h"
#include "base/writable_file.h"

namespace nibble {

/// A file that threads fill part by part, every byte once, past the page cache (O_DIRECT): the
/// device is faster so, and the processor is left alone. Where the file system refuses that, bytes
/// go through the cache.
class BlockFile final {
 public:
  static constexpr int64_t kBlock = 4096;

  /// Opens the file, creating it if it is not there, takes its lock, and asks for room for
  /// `bytes` bytes (what the file system makes of that only matters for speed). Errors as of
  /// SharedFile::open_locked().
  static Result<std::unique_ptr<BlockFile>> open_locked(const std::string& path, int64_t bytes);
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;
  /// Flushes, as far as that succeeds.
  ~BlockFile();

  /// Writes a part. A block that parts share waits in memory for the last of them. Thread-safe.
  ///   part  in memory that BlockMemory::take() gave for `offset`; the rest of its first and last
  ///         block there is overwritten
  Status write(int64_t offset, std::span<std::byte> part);
  /// Writes what is known of blocks that are not full; what the file has of the rest of them stays.
  Status flush();
  /// The file as such; what was not flushed is not in it.
  [[nodiscard]] SharedFile& file() { return file_; }

 private:
  // A block that is not full.
  struct Edge {
    std::array<std::byte, kBlock> bytes;
    std::vector<std::pair<int64_t, int64_t>> known;  // [begin, end)
    int64_t filled = 0;
  };

  BlockFile(SharedFile file, Descriptor past_cache, std::string path);
  Result<bool> complete(int64_t begin, int64_t end, std::byte* block);
  Status write_blocks(int64_t offset, std::span<const std::byte> blocks);
  Status flush_edges();

  SharedFile file_;
  Descriptor past_cache_;
  std::string path_;
  std::atomic<bool> direct_;  // the file system has not refused so far
  std::mutex mutex_;
  std::unordered_map<int64_t, Edge> edges_;  // by offset of the block
};

/// Memory for parts on their way into a BlockFile, of huge pages if the system has some: devices
/// take few long runs of memory better than many pages.
class BlockMemory final {
 public:
  /// Room for at least `bytes`.
  explicit BlockMemory(int64_t bytes);

  /// What a BlockMemory of these bytes really takes.
  [[nodiscard]] static int64_t size(int64_t bytes);

  /// How much of it a part of this many bytes takes at most, wherever it belongs.
  [[nodiscard]] static int64_t needed(int64_t bytes);
  /// Takes the next room: `bytes` bytes that lie in their first block as they will in the file.
  std::span<std::byte> take(int64_t offset, int64_t bytes);
  /// Gives all of it back.
  void clear() { used_ = 0; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };

  std::unique_ptr<std::byte, Free> memory_;
  int64_t bytes_;
  int64_t used_ = 0;
};

}  // namespace nibble
