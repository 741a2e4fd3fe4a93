#include "synthetic/dummy_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "base/f16.h"
#include "base/thread_pool.h"
#include "checkpoint/safetensors.h"
#include "core/buffer.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr double kDeviation = 0.02;            // transformers' initializer_range
constexpr int64_t kQuantiles = 65536;          // a random word of 64 bits picks four
constexpr int64_t kBlock = int64_t{8} << 20;   // elements generated at once
constexpr int64_t kChunk = int64_t{64} << 10;  // elements of a thread's turn
// Of 32 Gaussian numbers the largest is 2.07 deviations on average, of 16384 it is 4.
constexpr double kInt4Step = 2.07 / 7;
constexpr double kE2M1Step = 2.07 / 4;
constexpr double kE4M3Step = 4.0 / 448;
constexpr double kInt8Step = 4.0 / 127;

/// x with P(X < x) = p for the standard normal distribution, by Newton's method.
double normal_quantile(double p) {
  double x = 0;
  for (int step = 0; step < 100; ++step) {
    const double error = 0.5 * std::erfc(-x / std::sqrt(2.0)) - p;
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
    const double delta = std::clamp(error / density, -0.5, 0.5);
    x -= delta;
    if (std::abs(delta) < 1e-12) {
      break;
    }
  }
  return x;
}

/// The finalizer of splitmix64: a bijection whose outputs for 0, 1, 2... look independent.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint64_t tensor_seed(uint64_t seed, std::string_view name) {
  uint64_t hash = mix(seed + 0x9e3779b97f4a7c15ULL);
  for (const char c : name) {
    hash = mix(hash ^ static_cast<uint8_t>(c));
  }
  return hash;
}

/// 65536 equally likely elements.
template <typename T>
using Table = std::vector<T>;

template <typename T>
Table<T> gaussian_table(T (*convert)(float)) {
  Table<T> table(kQuantiles);
  for (int64_t i = 0; i < kQuantiles / 2; ++i) {
    const double p = (static_cast<double>(i) + 0.5) / static_cast<double>(kQuantiles);
    const auto value = static_cast<float>(kDeviation * normal_quantile(p));
    table[static_cast<size_t>(i)] = convert(value);
    table[static_cast<size_t>(kQuantiles - 1 - i)] = convert(-value);
  }
  return table;
}

/// Scales `center` times 2^-0.5 to 2^0.5.
template <typename T>
Table<T> scale_table(double center, T (*convert)(float)) {
  Table<T> table(kQuantiles);
  for (int64_t i = 0; i < kQuantiles; ++i) {
    const double exponent = (static_cast<double>(i) + 0.5) / static_cast<double>(kQuantiles) - 0.5;
    table[static_cast<size_t>(i)] = convert(static_cast<float>(center * std::exp2(exponent)));
  }
  return table;
}

/// Two codes of 4 bits, each picked by 8 of the 16 bits.
Table<uint8_t> pair_table(double step, uint8_t (*encode)(float)) {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < 256; ++i) {
    codes[i] =
        encode(static_cast<float>(normal_quantile((static_cast<double>(i) + 0.5) / 256) / step));
  }
  Table<uint8_t> table(kQuantiles);
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<uint8_t>(codes[i & 255] | (codes[i >> 8] << 4));
  }
  return table;
}

uint8_t int4_code(float value) {
  return static_cast<uint8_t>(static_cast<int>(std::clamp(std::round(value), -7.0F, 7.0F)) + 8);
}

float unchanged(float value) { return value; }

uint8_t int4_signed(float value) { return (int4_code(value) ^ 8) & 15; }

/// Codes of 8 bits, picked by all 16.
Table<uint8_t> code_table(double step, uint8_t (*encode)(float)) {
  Table<uint8_t> table(kQuantiles);
  for (size_t i = 0; i < table.size(); ++i) {
    const double p = (static_cast<double>(i) + 0.5) / static_cast<double>(kQuantiles);
    table[i] = encode(static_cast<float>(normal_quantile(p) / step));
  }
  return table;
}

uint8_t int8_code(float value) {
  return static_cast<uint8_t>(static_cast<int8_t>(std::clamp(std::round(value), -127.0F, 127.0F)));
}

uint8_t int8_offset(float value) { return int8_code(value) ^ 0x80; }

Table<uint8_t> byte_table(DummyContent content) {
  switch (content) {
    case DummyContent::kInt4Codes:
      return pair_table(kInt4Step, int4_code);
    case DummyContent::kInt4Signed:
      return pair_table(kInt4Step, int4_signed);
    case DummyContent::kInt8Codes:
      return code_table(kInt8Step, int8_code);
    case DummyContent::kInt8Offset:
      return code_table(kInt8Step, int8_offset);
    case DummyContent::kE2M1Codes:
      return pair_table(kE2M1Step, encode_e2m1);
    case DummyContent::kE8M0Scales: {
      Table<uint8_t> table(kQuantiles, encode_e8m0(0x1p-7F));  // around 0.02 * kE2M1Step
      std::fill_n(table.begin(), kQuantiles / 4, encode_e8m0(0x1p-6F));
      return table;
    }
    default:  // kE4M3Codes
      return code_table(kE4M3Step, encode_e4m3);
  }
}

template <typename T>
Table<T> float_table(DummyContent content, T (*convert)(float)) {
  switch (content) {
    case DummyContent::kOnes:
      return Table<T>(kQuantiles, convert(1));
    case DummyContent::kInt4Scales:
      return scale_table(kDeviation * kInt4Step, convert);
    case DummyContent::kInt4OfFp8Scales:
      return scale_table(kInt4Step / kE4M3Step, convert);
    case DummyContent::kInt8Scales:
      return scale_table(kDeviation * kInt8Step, convert);
    case DummyContent::kE4M3Scales:
      return scale_table(kDeviation * kE4M3Step, convert);
    default:
      return gaussian_table(convert);
  }
}

/// Elements [begin, begin + out.size()) of a tensor; begin is a multiple of 4.
template <typename T>
void fill(const Table<T>& table, uint64_t seed, int64_t begin, std::span<T> out) {
  uint64_t counter = static_cast<uint64_t>(begin) / 4;
  for (size_t i = 0; i < out.size(); i += 4, ++counter) {
    uint64_t word = mix(seed + counter * 0x9e3779b97f4a7c15ULL);
    for (size_t j = i; j < std::min(i + 4, out.size()); ++j, word >>= 16) {
      out[j] = table[word & 0xffff];
    }
  }
}

class TensorGenerator final {
 public:
  TensorGenerator(const DummyWriteOptions& options, CheckpointWriter& writer)
      : options_(options), writer_(writer), pool_(options.threads) {}

  Status write(const DummyTensor& tensor, int64_t bytes) {
    if (tensor.content == DummyContent::kShape) {
      return write_shape(tensor);
    }
    switch (tensor.dtype) {
      case DType::kF32:
        return write_as(tensor, bytes / 4, table(singles_, tensor, unchanged));
      case DType::kBF16:
        return write_as(tensor, bytes / 2, table(halves_, tensor, f32_to_bf16));
      case DType::kF16:
        return write_as(tensor, bytes / 2, table(halves_, tensor, f32_to_f16));
      default:
        break;
    }
    auto [found, is_new] = bytes_.try_emplace({tensor.content, tensor.dtype});
    if (is_new) {
      found->second = byte_table(tensor.content);
    }
    return write_as(tensor, bytes, found->second);
  }

 private:
  using Key = std::pair<DummyContent, DType>;

  Status write_shape(const DummyTensor& tensor) {
    const int64_t wide[2] = {tensor.n, tensor.k};
    const int32_t narrow[2] = {static_cast<int32_t>(tensor.n), static_cast<int32_t>(tensor.k)};
    const auto bytes = tensor.dtype == DType::kI64
                           ? std::span<const std::byte>(std::as_bytes(std::span(wide)))
                           : std::span<const std::byte>(std::as_bytes(std::span(narrow)));
    return writer_.write(tensor.name, bytes);
  }

  template <typename T>
  static const Table<T>& table(std::map<Key, Table<T>>& tables,
                               const DummyTensor& tensor,
                               T (*convert)(float)) {
    auto [found, is_new] = tables.try_emplace({tensor.content, tensor.dtype});
    if (is_new) {
      found->second = float_table(tensor.content, convert);
    }
    return found->second;
  }

  template <typename T>
  Status write_as(const DummyTensor& tensor, int64_t elements, const Table<T>& table) {
    if (block_.size() == 0) {
      NIBBLE_ASSIGN_OR_RETURN(block_, Buffer::allocate(kBlock * sizeof(float)));
    }
    const uint64_t seed = tensor_seed(options_.seed, tensor.name);
    for (int64_t begin = 0; begin < elements; begin += kBlock) {
      const int64_t count = std::min(kBlock, elements - begin);
      const std::span<T> block = block_.as<T>().first(static_cast<size_t>(count));
      pool_.parallel_for((count + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
        const int64_t at = chunk * kChunk;
        fill(table, seed, begin + at,
             block.subspan(static_cast<size_t>(at),
                           static_cast<size_t>(std::min(kChunk, count - at))));
      });
      NIBBLE_RETURN_IF_ERROR(writer_.write_part(tensor.name, std::as_bytes(block)));
    }
    return {};
  }

  const DummyWriteOptions& options_;
  CheckpointWriter& writer_;
  ThreadPool pool_;
  Buffer block_;
  std::map<Key, Table<float>> singles_;
  std::map<Key, Table<uint16_t>> halves_;
  std::map<Key, Table<uint8_t>> bytes_;
};

}  // namespace

int64_t weights_of_element(DummyContent content) {
  switch (content) {
    case DummyContent::kInt4Codes:
    case DummyContent::kInt4Signed:
      return 8;
    case DummyContent::kInt8Offset:
      return 4;
    case DummyContent::kE2M1Codes:
      return 2;
    case DummyContent::kOnes:
    case DummyContent::kGaussian:
    case DummyContent::kInt8Codes:
    case DummyContent::kE4M3Codes:
      return 1;
    default:
      return 0;
  }
}

Status write_dummy_tensors(const std::vector<DummyTensor>& tensors,
                           const DummyWriteOptions& options,
                           CheckpointWriter& writer) {
  std::vector<int64_t> sizes;
  int64_t total = 0;
  for (const DummyTensor& tensor : tensors) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t bytes, tensor_bytes(tensor.dtype, tensor.shape));
    sizes.push_back(bytes);
    total += bytes;
  }
  TensorGenerator generator(options, writer);
  int64_t done = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    NIBBLE_RETURN_IF_ERROR(generator.write(tensors[i], sizes[i]));
    done += sizes[i];
    if (options.progress) {
      options.progress(done, total);
    }
  }
  return writer.finish();
}

}  // namespace nibble
