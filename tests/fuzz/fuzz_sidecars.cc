#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include <unistd.h>

#include "base/check.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/fmpq_sidecar.h"
#include "checkpoint/kv_sidecar.h"

namespace {

using namespace nibble;

constexpr int64_t kInputs = 64;

/// A folder with the INT4 weights of two matrices.
std::string make_folder() {
  const std::string folder = "/dev/shm/nibble_fuzz_sidecars_" + std::to_string(::getpid());
  std::filesystem::create_directories(folder);
  const std::vector<TensorPlan> plan = {{"a.weight_packed", DType::kI32, {2, kInputs / 8}},
                                        {"a.weight_scale", DType::kBF16, {2, kInputs / 32}},
                                        {"b.weight_packed", DType::kI32, {2, kInputs / 8}},
                                        {"b.weight_scale", DType::kBF16, {2, kInputs / 32}}};
  auto writer = CheckpointWriter::create(folder, plan, 1 << 20);
  CHECK(writer.ok());
  for (const TensorPlan& tensor : plan) {
    const auto bytes = static_cast<size_t>(tensor_bytes(tensor.dtype, tensor.shape).value());
    CHECK(writer->write(tensor.name, std::vector<std::byte>(bytes)).ok());
  }
  CHECK(writer->finish().ok());
  return folder;
}

void write_file(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(text.data(), static_cast<std::streamsize>(text.size()));
}

// What is read can be described, and written and read again.
void read_kv(const std::string& folder, std::string_view text) {
  const std::string path = kv_sidecar_path(folder);
  write_file(path, text);
  const KvSidecarShape shape{
      .layers = 2, .kv_heads = 1, .head_dim = 2, .sinks = text.size() % 2 > 0};
  const auto sidecar = read_kv_sidecar(path, shape);
  if (sidecar.ok()) {
    static_cast<void>(describe(*sidecar));
    static_cast<void>(has_ranges(*sidecar));
    CHECK(write_kv_sidecar(*sidecar, shape, path).ok());
    CHECK(read_kv_sidecar(path, shape).ok());
  }
}

// The same; `text` is the JSON, a byte of 0, and the file of tensors.
void read_fmpq(const std::string& folder, std::string_view text) {
  static const CheckpointReader weights = CheckpointReader::open(folder).value();
  const size_t end = text.find('\0');
  write_file(folder + "/" + std::string(kFmpqSidecarName), text.substr(0, end));
  write_file(folder + "/" + std::string(kFmpqTensorsName),
             end == std::string_view::npos ? "" : text.substr(end + 1));
  const auto sidecar = read_fmpq_sidecar(folder, weights);
  if (sidecar.ok()) {
    static_cast<void>(describe(*sidecar, weights));
    CHECK(write_fmpq_sidecar(*sidecar, weights, folder).ok());
    CHECK(read_fmpq_sidecar(folder, weights).ok());
  }
}

}  // namespace

// The first byte says which sidecar the others are: k of a KV cache, else of blocks.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string folder = make_folder();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.empty()) {
    return 0;
  }
  text.front() == 'k' ? read_kv(folder, text.substr(1)) : read_fmpq(folder, text.substr(1));
  return 0;
}
