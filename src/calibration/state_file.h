#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "base/shared_file.h"
#include "base/status.h"
#include "quantizer/digest.h"

namespace nibble {

/// Rows of activations of all windows in a file, one slab for each window: what a model computes of
/// a text need not fit into memory.
class StateFile final {
 public:
  /// Creates or reopens it. slab_bytes: of a window.
  static Result<StateFile> open(const std::string& path, int64_t slab_bytes);

  Status write(int64_t window, std::span<const std::byte> slab) {
    return file_.write_at(window * slab_bytes_, slab);
  }
  /// kCorrupt where the file ends before.
  Status read(int64_t window, std::span<std::byte> slab) const;
  /// Hash of the first `windows` slabs.
  Result<Digest> digest(int64_t windows) const;
  Status sync() { return file_.sync(); }

 private:
  StateFile(SharedFile file, std::string path, int64_t slab_bytes)
      : file_(std::move(file)), path_(std::move(path)), slab_bytes_(slab_bytes) {}

  SharedFile file_;
  std::string path_;
  int64_t slab_bytes_;
};

}  // namespace nibble
