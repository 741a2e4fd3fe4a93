#include "core/buffer.h"

#include <algorithm>
#include <utility>

#include <sys/mman.h>

#include "base/math.h"

namespace nibble {
namespace {

constexpr size_t kSmallPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kArenaBlock = size_t{128} << 20;
constexpr size_t kArenaUnit = 64;

}  // namespace

Result<Buffer> Buffer::allocate(size_t bytes) {
  Buffer buffer;
  buffer.size_ = bytes;
  if (bytes == 0) {
    return buffer;
  }
  const bool huge = bytes >= kHugePage;
  const size_t wanted = round_up(bytes, huge ? kHugePage : kSmallPage);
  const size_t mapped = huge ? wanted + kHugePage : wanted;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return make_error(StatusCode::kResourceExhausted, "cannot allocate {} bytes of memory", bytes);
  }
  auto* start = static_cast<std::byte*>(memory);
  if (huge) {  // cut the mapping down to its aligned part
    const auto address = reinterpret_cast<size_t>(start);
    const size_t skip = round_up(address, kHugePage) - address;
    if (skip != 0) {
      munmap(start, skip);
    }
    if (kHugePage - skip != 0) {
      munmap(start + skip + wanted, kHugePage - skip);
    }
    start += skip;
    madvise(start, wanted, MADV_HUGEPAGE);
  }
  buffer.data_ = start;
  buffer.reserved_ = wanted;
  return buffer;
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      reserved_(std::exchange(other.reserved_, 0)),
      block_(std::move(other.block_)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    reserved_ = std::exchange(other.reserved_, 0);
    block_ = std::move(other.block_);
  }
  return *this;
}

Buffer::~Buffer() { release(); }

void Buffer::release() {
  if (reserved_ != 0) {
    munmap(data_, reserved_);
  }
}

Result<Buffer> BufferArena::allocate(size_t bytes) {
  Buffer buffer;
  if (bytes == 0) {
    return buffer;
  }
  const size_t wanted = round_up(bytes, kArenaUnit);
  if (block_ != nullptr && block_.use_count() == 1) {
    used_ = 0;  // nobody has any of it
  }
  if (block_ == nullptr || block_->size() - used_ < wanted) {
    NIBBLE_ASSIGN_OR_RETURN(Buffer block, Buffer::allocate(std::max(wanted, kArenaBlock)));
    block_ = std::make_shared<Buffer>(std::move(block));
    used_ = 0;
  }
  buffer.data_ = block_->data() + used_;
  buffer.size_ = bytes;
  buffer.block_ = block_;
  used_ += wanted;
  return buffer;
}

}  // namespace nibble
