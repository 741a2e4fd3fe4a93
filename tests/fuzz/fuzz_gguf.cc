#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gguf/block_parts.h"
#include "gguf/decode.h"
#include "gguf/file.h"

namespace {

using namespace nibble::gguf;

// Every value can be asked for in every way, and tells the truth about its size.
void read_metadata(const Metadata& metadata) {
  for (const auto& [key, value] : metadata.entries()) {
    if (metadata.find(key) != &value) {
      __builtin_trap();
    }
    static_cast<void>(metadata.require_uint(key));
    static_cast<void>(metadata.require_float(key));
    static_cast<void>(metadata.require_bool(key));
    static_cast<void>(metadata.require_ints(key));
    static_cast<void>(metadata.require_floats(key));
    const auto text = metadata.require_string(key);
    size_t sum = text.ok() ? text->size() : 0;
    if (const auto texts = metadata.require_strings(key); texts.ok()) {
      for (const std::string_view element : *texts) {
        sum += element.size();
      }
    }
    if (sum > value.data.size()) {
      __builtin_trap();
    }
  }
}

// The last block is decoded, so that the end of the data is read.
void read_tensor(const Tensor& tensor) {
  const TypeTraits& traits = type_traits(tensor.type);
  const std::span<const std::byte> block = tensor.data.last(static_cast<size_t>(traits.bytes));
  std::vector<float> values(static_cast<size_t>(traits.elements));
  decode_blocks(tensor.type, block.data(), 1, values.data());
  if (has_parts(tensor.type)) {
    std::vector<std::byte> codes(static_cast<size_t>(code_bytes(tensor.type)));
    std::vector<std::byte> scales(static_cast<size_t>(scale_bytes(tensor.type)));
    std::vector<std::byte> minimums(2);
    split_blocks(tensor.type, block.data(), 1,
                 {.codes = codes.data(), .scales = scales.data(), .minimums = minimums.data()});
  }
}

}  // namespace

// Any bytes either are refused, or every value and tensor lies inside them.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  const auto content = parse_gguf(file, "fuzz.gguf");
  if (!content.ok()) {
    return 0;
  }
  read_metadata(content->metadata);
  for (const Tensor& tensor : content->tensors()) {
    if (tensor.data.size() !=
        static_cast<size_t>(tensor.blocks() * type_traits(tensor.type).bytes)) {
      __builtin_trap();
    }
    read_tensor(tensor);
  }
  return 0;
}
