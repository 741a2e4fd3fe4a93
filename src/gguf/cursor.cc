#include "gguf/cursor.h"

namespace nibble::gguf {

Result<std::span<const std::byte>> Cursor::take(uint64_t count, std::string_view what) {
  if (count > remaining()) {
    return make_error(StatusCode::kCorrupt,
                      "{} needs {} bytes at byte {}, but the file has {} left: it is cut off or "
                      "damaged; download it again",
                      what, count, at_, remaining());
  }
  const std::span<const std::byte> bytes = file_.subspan(at_, count);
  at_ += count;
  return bytes;
}

Result<std::string_view> Cursor::string(std::string_view what) {
  NIBBLE_ASSIGN_OR_RETURN(const uint64_t length, number<uint64_t>(what));
  NIBBLE_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, take(length, what));
  return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Status Cursor::check_count(uint64_t count, uint64_t smallest, std::string_view what) const {
  if (count <= remaining() / smallest) {
    return {};
  }
  return make_error(StatusCode::kCorrupt,
                    "{} {} do not fit the {} bytes that follow byte {}: the file is cut off or "
                    "damaged; download it again",
                    count, what, remaining(), at_);
}

Result<uint64_t> Cursor::count(uint64_t smallest, std::string_view what) {
  NIBBLE_ASSIGN_OR_RETURN(const uint64_t count,
                          number<uint64_t>(fmt::format("the number of {}", what)));
  NIBBLE_RETURN_IF_ERROR(check_count(count, smallest, what));
  return count;
}

}  // namespace nibble::gguf
