#include <cstddef>
#include <cstdint>
#include <span>

#include "checkpoint/safetensors.h"

// Any bytes either are refused, or every tensor lies inside them.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  const auto content = nibble::parse_safetensors(file, "fuzz.safetensors");
  if (!content.ok()) {
    return 0;
  }
  for (const nibble::TensorInfo& tensor : content->tensors) {
    if (!tensor.data.empty() && (tensor.data.data() < file.data() ||
                                 tensor.data.data() + tensor.data.size() > file.data() + size)) {
      __builtin_trap();
    }
  }
  return 0;
}
