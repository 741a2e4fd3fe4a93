#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "arch/config.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_writer.h"
#include "core/dtype.h"
#include "quant/scheme.h"

namespace nibble {

/// What the elements of a random tensor are. Codes and scales together give numbers like those of
/// kGaussian.
enum class DummyContent : uint8_t {
  kOnes,        // norms
  kGaussian,    // deviation 0.02
  kInt4Codes,   // offset binary -7..7, eight in an I32
  kInt4Signed,  // two's complement -7..7, eight in an I32
  kInt4Scales,
  kInt4OfFp8Scales,  // of codes whose values kE4M3Scales multiplies once more
  kInt8Codes,
  kInt8Offset,  // code + 128, four in an I32
  kInt8Scales,
  kShape,      // I32 or I64 [2]: n and k
  kE2M1Codes,  // two in a U8
  kE8M0Scales,
  kE4M3Codes,
  kE4M3Scales,
};

/// Weights of kGaussian that an element of a tensor codes; 0 for scales and shapes.
[[nodiscard]] int64_t weights_of_element(DummyContent content);

struct DummyTensor {
  std::string name;
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;
  DummyContent content = DummyContent::kGaussian;
  int64_t n = 0;  // kShape
  int64_t k = 0;
};

struct DummyStorage {
  const Json& config;  // of the checkpoint
  const Json& fields;  // of the language model, with quantization_config where that is kept
  std::string where;   // for messages
  DType dtype = DType::kBF16;
  std::optional<QuantScheme> scheme;  // instead of what quantization_config says
  std::optional<QuantScheme> others;  // with `scheme`: of linear layers of no routed expert
};

/// The scheme of routed experts that quantization_config says are INT4 in groups, as they are made
/// without a scheme. kUnsupported, naming the field and the remedy, for other experts.
Result<QuantScheme> scheme_of_experts(const Json& fields, const std::string& where);

/// Every tensor of a checkpoint, in the order of the layers.
struct DummyList {
  std::vector<DummyTensor> tensors;
  Json quantization_config;  // to write; null: the config's own stays as it is
};

/// With a scheme: what `nibble quantize` makes of the model in it, in the scheme's default dialect.
/// Else stored as quantization_config says: routed experts as compressed-tensors INT4 in groups, or
/// all linear layers as FP8 in blocks of 128x128, or experts as MXFP4 where the family publishes
/// them fused; without one everything in `dtype`. Errors name the field: kUnsupported, kCorrupt.
Result<DummyList> list_dummy_tensors(const ModelConfig& model, const DummyStorage& storage);

/// Generates tensors in blocks on all cores and hands them to the writer. Every element depends on
/// the seed, the name of its tensor, its content and its place only.
struct DummyWriteOptions {
  uint64_t seed = 0;
  int threads = 0;
  std::function<void(int64_t bytes_done, int64_t bytes_total)> progress;  // may be empty
};
Status write_dummy_tensors(const std::vector<DummyTensor>& tensors,
                           const DummyWriteOptions& options,
                           CheckpointWriter& writer);

}  // namespace nibble
