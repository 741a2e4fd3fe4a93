#include "base/block_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"

namespace nibble {
namespace {

constexpr int64_t kBlock = BlockFile::kBlock;
constexpr int64_t kHugePage = 2 << 20;
constexpr size_t kMostEdges = 256;  // a megabyte; fewer than ten in files that are written in order

int64_t round_down(int64_t offset) { return offset / kBlock * kBlock; }
int64_t round_up(int64_t offset) { return round_down(offset + kBlock - 1); }

}  // namespace

BlockFile::BlockFile(SharedFile file, Descriptor past_cache, std::string path)
    : file_(std::move(file)),
      past_cache_(std::move(past_cache)),
      path_(std::move(path)),
      direct_(past_cache_.get() >= 0) {}

Result<std::unique_ptr<BlockFile>> BlockFile::open_locked(const std::string& path, int64_t bytes) {
  NIBBLE_ASSIGN_OR_RETURN(SharedFile file, SharedFile::open_locked(path));
  Descriptor past_cache(::open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC));
  if (past_cache.get() >= 0) {
    // Writes that make a file longer, or fill holes, wait for each other. Refused on some file
    // systems, and on a full disk, where as many bytes shall be written as fit.
    static_cast<void>(::fallocate(past_cache.get(), 0, 0, bytes));
  }
  return std::unique_ptr<BlockFile>(new BlockFile(std::move(file), std::move(past_cache), path));
}

BlockFile::~BlockFile() { static_cast<void>(flush()); }

Status BlockFile::write(int64_t offset, std::span<std::byte> part) {
  if (part.empty()) {
    return {};
  }
  const int64_t end = offset + static_cast<int64_t>(part.size());
  const int64_t head = round_down(offset);
  const int64_t tail = round_down(end);
  std::byte* const memory = part.data() - (offset - head);  // of `head`
  CHECK_EQ(reinterpret_cast<uintptr_t>(memory) % kBlock, uintptr_t{0});
  int64_t from = round_up(offset);
  int64_t to = tail;
  if (head < offset && head < tail) {
    NIBBLE_ASSIGN_OR_RETURN(const bool full, complete(offset, from, memory));
    from = full ? head : from;
  }
  if (tail < end) {
    NIBBLE_ASSIGN_OR_RETURN(const bool full,
                            complete(std::max(offset, tail), end, memory + (tail - head)));
    from = full ? std::min(from, tail) : from;
    to = full ? tail + kBlock : to;
  }
  return from < to ? write_blocks(from, {memory + (from - head), static_cast<size_t>(to - from)})
                   : Status();
}

// Bytes [begin, end) of the block in memory are valid. True when the others are known: they are
// then there, too.
Result<bool> BlockFile::complete(int64_t begin, int64_t end, std::byte* block) {
  const int64_t front = begin % kBlock;
  const int64_t back = front + (end - begin);
  const std::lock_guard lock(mutex_);
  const auto found = edges_.try_emplace(round_down(begin)).first;
  Edge& edge = found->second;
  edge.filled += end - begin;
  if (edge.filled == kBlock) {
    std::memcpy(block, edge.bytes.data(), static_cast<size_t>(front));
    std::memcpy(block + back, edge.bytes.data() + back, static_cast<size_t>(kBlock - back));
    edges_.erase(found);
    return true;
  }
  std::memcpy(edge.bytes.data() + front, block + front, static_cast<size_t>(back - front));
  edge.known.emplace_back(front, back);
  if (edges_.size() > kMostEdges) {
    NIBBLE_RETURN_IF_ERROR(flush_edges());
  }
  return false;
}

Status BlockFile::flush() {
  const std::lock_guard lock(mutex_);
  return flush_edges();
}

// Under the lock.
Status BlockFile::flush_edges() {
  for (const auto& [offset, edge] : edges_) {
    for (const auto& [begin, end] : edge.known) {
      NIBBLE_RETURN_IF_ERROR(file_.write_at(
          offset + begin,
          std::span(edge.bytes)
              .subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))));
    }
  }
  edges_.clear();
  return {};
}

Status BlockFile::write_blocks(int64_t offset, std::span<const std::byte> blocks) {
  while (direct_ && !blocks.empty()) {
    const ssize_t count = ::pwrite(past_cache_.get(), blocks.data(), blocks.size(), offset);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {
      direct_ = false;  // larger blocks than ours, or opening it promised too much
      break;
    }
    if (count < 0) {
      return file_error(path_, "write", errno);
    }
    const int64_t done = round_down(count);
    if (done == 0) {
      break;  // part of a block: the page cache can say why
    }
    blocks = blocks.subspan(static_cast<size_t>(done));
    offset += done;
  }
  return file_.write_at(offset, blocks);
}

BlockMemory::BlockMemory(int64_t bytes)
    : memory_(static_cast<std::byte*>(
          ::operator new(static_cast<size_t>(size(bytes)), std::align_val_t(kHugePage)))),
      bytes_(size(bytes)) {
  // Advice; there may be none.
  static_cast<void>(::madvise(memory_.get(), static_cast<size_t>(bytes_), MADV_HUGEPAGE));
}

void BlockMemory::Free::operator()(std::byte* memory) const {
  ::operator delete(memory, std::align_val_t(kHugePage));
}

int64_t BlockMemory::size(int64_t bytes) {
  return std::max<int64_t>(1, (bytes + kHugePage - 1) / kHugePage) * kHugePage;
}

int64_t BlockMemory::needed(int64_t bytes) { return round_up(bytes) + kBlock; }

std::span<std::byte> BlockMemory::take(int64_t offset, int64_t bytes) {
  const int64_t begin = used_ + offset % kBlock;
  used_ = round_up(begin + bytes);
  CHECK_LE(used_, bytes_);
  return {memory_.get() + begin, static_cast<size_t>(bytes)};
}

}  // namespace nibble
