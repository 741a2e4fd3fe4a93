#include "calibration/state_file.h"

#include <vector>

namespace nibble {

Result<StateFile> StateFile::open(const std::string& path, int64_t slab_bytes) {
  NIBBLE_ASSIGN_OR_RETURN(SharedFile file, SharedFile::open_locked(path));
  return StateFile(std::move(file), path, slab_bytes);
}

Status StateFile::read(int64_t window, std::span<std::byte> slab) const {
  NIBBLE_ASSIGN_OR_RETURN(const size_t count, file_.read_at(window * slab_bytes_, slab));
  return count == slab.size()
             ? Status()
             : make_error(StatusCode::kCorrupt, "{}: ends within window {}", path_, window);
}

Result<Digest> StateFile::digest(int64_t windows) const {
  std::vector<Digest> digests;
  std::vector<std::byte> slab(static_cast<size_t>(slab_bytes_));
  for (int64_t window = 0; window < windows; ++window) {
    NIBBLE_RETURN_IF_ERROR(read(window, slab));
    digests.push_back(digest_of(slab));
  }
  return combine_digests(digests);
}

}  // namespace nibble
