#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/linear_reader.h"
#include "checkpoint/source_matrix.h"

namespace {

using nibble::TensorPlan;

constexpr int64_t kMostBytes = int64_t{1} << 18;    // of all tensors
constexpr int64_t kMostWeights = int64_t{1} << 16;  // decoded at once

// "name DTYPE 2,3", one a line.
std::vector<TensorPlan> read_tensors(std::string_view text) {
  std::vector<TensorPlan> tensors;
  int64_t total = 0;
  while (!text.empty() && tensors.size() < 24) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const size_t first = line.find(' ');
    const size_t second = first == line.npos ? first : line.find(' ', first + 1);
    if (second == line.npos) {
      continue;
    }
    TensorPlan tensor;
    tensor.name = line.substr(0, first);
    const auto dtype = nibble::dtype_from_name(line.substr(first + 1, second - first - 1));
    tensor.dtype = dtype.value_or(nibble::DType::kU8);
    int64_t size = -1;
    for (const char c : line.substr(second + 1)) {
      if (c >= '0' && c <= '9') {
        size = std::min<int64_t>(std::max<int64_t>(size, 0) * 10 + (c - '0'), kMostBytes);
      } else if (size >= 0) {
        tensor.shape.push_back(size);
        size = -1;
      }
    }
    if (size >= 0) {
      tensor.shape.push_back(size);
    }
    const auto bytes = nibble::tensor_bytes(tensor.dtype, tensor.shape);
    const bool known = std::any_of(tensors.begin(), tensors.end(), [&](const TensorPlan& other) {
      return other.name == tensor.name;
    });
    if (!bytes.ok() || known || total + *bytes > kMostBytes) {
      continue;
    }
    tensor.bytes = *bytes;
    total += *bytes;
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

void decode_some(const nibble::SourceMatrix& matrix) {
  if (matrix.k() > kMostWeights) {
    return;
  }
  const int64_t rows = std::min<int64_t>(matrix.n(), kMostWeights / matrix.k());
  std::vector<float> out(static_cast<size_t>(rows * matrix.k()));
  for (const int64_t row : {int64_t{0}, matrix.n() - rows, matrix.n() / 2}) {
    const int64_t count = std::min(rows, matrix.n() - row);
    static_cast<void>(matrix.decode(row, count, out.data()));
    volatile unsigned sum = 0;
    for (const auto& span : matrix.touched(row, count)) {
      sum = sum + std::to_integer<unsigned>(span.front()) + std::to_integer<unsigned>(span.back());
    }
  }
}

void read_checkpoint(const std::string& path, const nibble::Json& config) {
  const auto reader = nibble::CheckpointReader::open(path);
  if (!reader.ok()) {
    return;
  }
  const auto model = nibble::list_source_matrices(*reader, config);
  if (model.ok()) {
    for (const auto& matrix : model->matrices) {
      decode_some(*matrix);
    }
  }
  const auto quant = nibble::read_quant_config(config, "");
  if (quant.ok()) {
    const auto linear = nibble::map_linear_weights(*reader, *quant, "m");
    if (linear.ok()) {
      static_cast<void>(nibble::copy_of(linear->weight));  // reads all codes and scales
    }
  }
}

}  // namespace

// Input: a config.json, a zero byte, tensor lines, a zero byte, and bytes that fill the tensors
// over and over. Either the checkpoint is refused, or all its matrices can be decoded.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t first = input.find('\0');
  const size_t second = first == input.npos ? first : input.find('\0', first + 1);
  if (second == input.npos) {
    return 0;
  }
  const auto json = nibble::Json::parse(input.substr(0, first));
  if (!json.ok()) {
    return 0;
  }
  const auto tensors = read_tensors(input.substr(first + 1, second - first - 1));
  const std::string_view fill = input.substr(second + 1);
  std::string file = nibble::safetensors_header(tensors);
  for (const TensorPlan& tensor : tensors) {
    for (int64_t i = 0; i < tensor.bytes; ++i) {
      file.push_back(fill.empty() ? '\0' : fill[static_cast<size_t>(i) % fill.size()]);
    }
  }
  const int descriptor = ::memfd_create("checkpoint", 0);
  if (descriptor >= 0 && ::write(descriptor, file.data(), file.size()) >= 0) {
    read_checkpoint("/proc/self/fd/" + std::to_string(descriptor), *json);
  }
  ::close(descriptor);
  return 0;
}
