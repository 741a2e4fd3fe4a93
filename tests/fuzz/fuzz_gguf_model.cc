#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>

#include <unistd.h>

#include "arch/config.h"
#include "arch/gguf.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/linear_reader.h"
#include "gguf/split.h"

namespace {

using namespace nibble;

std::string write_file(std::span<const uint8_t> bytes) {
  std::string path = "/dev/shm/nibble_fuzz_gguf_" + std::to_string(::getpid()) + ".gguf";
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

void read_config(const std::string& path) {
  const auto files = gguf::FileSet::open(path);
  if (!files.ok()) {
    return;
  }
  static_cast<void>(gguf_generation_config(files->metadata()));
  if (const auto config = gguf_config(*files); config.ok()) {
    static_cast<void>(parse_model_config({.text = config->dump()}));
  }
}

// Every byte of every tensor can be read, and each matrix either is refused or mapped.
void read_tensors(const std::string& path) {
  const auto reader = CheckpointReader::open(path);
  if (!reader.ok()) {
    return;
  }
  unsigned sum = 0;
  for (const TensorInfo* tensor : reader->tensors()) {
    for (const std::byte byte : tensor->data) {
      sum += static_cast<unsigned>(byte);
    }
    static_cast<void>(reader->where(*tensor));
    reader->drop_pages(*tensor);
    if (tensor->name.ends_with(".weight")) {
      const std::string module = tensor->name.substr(0, tensor->name.size() - 7);
      static_cast<void>(map_linear_weights(*reader, QuantConfig{}, module));
    }
  }
  volatile unsigned read = sum;
  static_cast<void>(read);
}

}  // namespace

// A file of any bytes is refused or read: its config, and its tensors under their new names.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = write_file({data, size});
  read_config(path);
  read_tensors(path);
  return 0;
}
