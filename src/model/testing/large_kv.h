#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"

namespace nibble {

/// Copies of a checkpoint that are the same function with larger or smaller keys and values: keys
/// 2^7 times in even layers and 2^5 times in odd ones, values 2^9 and 2^-9 times. Queries and
/// outputs make up for it, and powers of two round nothing.
inline int key_power(int64_t layer) { return layer % 2 == 0 ? 7 : 5; }
inline int value_power(int64_t layer) { return layer % 2 == 0 ? 9 : -9; }

inline int power_of_tensor(const std::string& name) {
  const size_t at = name.find("layers.");
  if (at == std::string::npos) {
    return 0;
  }
  const int64_t layer = std::stoll(name.substr(at + 7));
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  return has("k_proj")   ? key_power(layer)
         : has("q_proj") ? -key_power(layer)
         : has("v_proj") ? value_power(layer)
         : has("o_proj") ? -value_power(layer)
                         : 0;
}

/// The numbers of a tensor in F32 or BF16 times 2^power.
inline std::vector<std::byte> times_power(const TensorInfo& tensor, int power) {
  std::vector<std::byte> bytes(tensor.data.begin(), tensor.data.end());
  CHECK(power == 0 || tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16);
  const size_t size = tensor.dtype == DType::kF32 ? 4 : 2;
  for (size_t i = 0; power != 0 && i < bytes.size(); i += size) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size, bytes.data() + i, size);
    bits = std::bit_cast<uint32_t>(std::ldexp(std::bit_cast<float>(bits), power));
    std::memcpy(bytes.data() + i, reinterpret_cast<const char*>(&bits) + 4 - size, size);
  }
  return bytes;
}

struct NamedScale {
  std::string name;
  float value;
};

/// The scales that undo the powers.
inline std::vector<NamedScale> fitting_kv_scales(int64_t layers) {
  std::vector<NamedScale> scales;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
    scales.push_back({prefix + "k_scale", std::ldexp(1.0F, key_power(layer))});
    scales.push_back({prefix + "v_scale", std::ldexp(1.0F, value_power(layer))});
  }
  return scales;
}

/// Writes such a copy of `from`, with these scales, to a new folder `to`.
inline void write_large_kv(const std::string& from,
                           const std::filesystem::path& to,
                           const std::vector<NamedScale>& scales) {
  std::filesystem::remove_all(to);
  std::filesystem::create_directories(to);
  std::filesystem::copy(std::filesystem::path(from) / "config.json", to);
  const auto source = CheckpointReader::open(from).value();
  std::vector<TensorPlan> plan;
  for (const TensorInfo* tensor : source.tensors()) {
    plan.push_back({tensor->name, tensor->dtype, tensor->shape});
  }
  for (const NamedScale& scale : scales) {
    plan.push_back({scale.name, DType::kF32, {1}});
  }
  auto writer = CheckpointWriter::create(to.string(), plan, int64_t{1} << 30).value();
  for (const TensorInfo* tensor : source.tensors()) {
    CHECK(writer.write(tensor->name, times_power(*tensor, power_of_tensor(tensor->name))).ok());
  }
  for (const NamedScale& scale : scales) {
    CHECK(writer.write(scale.name, std::as_bytes(std::span(&scale.value, 1))).ok());
  }
  CHECK(writer.finish().ok());
}

}  // namespace nibble
