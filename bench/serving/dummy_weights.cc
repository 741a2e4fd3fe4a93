#include "bench/serving/dummy_weights.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "arch/family.h"
#include "base/math.h"
#include "bench/kernels/random_weight.h"
#include "checkpoint/dialect.h"
#include "quant/codec.h"
#include "quantizer/algorithms/nearest.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 256;  // whole blocks of 128 x 128
constexpr float kDeviation = 0.02F;
constexpr double kFourBitShare = 0.75;  // of blocks of activations, as bench kernels has it

std::vector<float> gaussian(int64_t count, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0.0F, kDeviation);
  std::vector<float> numbers(static_cast<size_t>(count));
  std::ranges::generate(numbers, [&] { return normal(random); });
  return numbers;
}

WeightCode code_of(DType type) {
  return type == DType::kF32   ? WeightCode::kF32
         : type == DType::kF16 ? WeightCode::kF16
                               : WeightCode::kBf16;
}

/// Modules that `nibble quantize` keeps.
std::set<std::string> plain_modules(const ModelConfig& config) {
  const Family& family =
      *family_as_stored(config.family, [](std::string_view /*tensor*/) { return false; });
  std::set<std::string> modules = {module_name(family, Role::kEmbedding),
                                   module_name(family, Role::kHead)};
  if (config.learned_positions) {
    modules.insert(module_name(family, Role::kPositions));
  }
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (has_experts(config, layer)) {
      modules.insert(module_name(family, Role::kRouter, layer));
    }
  }
  return modules;
}

/// Fills `to` with copies of `from`; the last may be cut.
void repeat(const Buffer& from, Buffer& to, ThreadPool& pool) {
  const size_t piece = from.size();
  if (to.size() == 0) {
    return;
  }
  pool.parallel_for(
      ceil_div(static_cast<int64_t>(to.size()), static_cast<int64_t>(piece)), [&](int64_t i, int) {
        const size_t begin = static_cast<size_t>(i) * piece;
        std::memcpy(to.data() + begin, from.data(), std::min(piece, to.size() - begin));
      });
}

}  // namespace

DummyWeights::DummyWeights(const ModelConfig& config, const QuantScheme& scheme, uint64_t seed)
    : scheme_(scheme),
      plain_{.code = code_of(config.dtype)},
      plains_(plain_modules(config)),
      random_(seed) {}

Result<const QuantTensor*> DummyWeights::rows_of(int64_t k, Kind kind) {
  const auto found = rows_.find({k, kind});
  if (found != rows_.end()) {
    return &found->second;
  }
  const PlainMatrix matrix{.n = kRows, .k = k, .w = gaussian(kRows * k, random_)};
  QuantTensor made;
  if (kind == Kind::kCoded) {
    NIBBLE_ASSIGN_OR_RETURN(made, nearest_codes(matrix, scheme_, default_dialect(scheme_), pool_));
  } else {
    NIBBLE_ASSIGN_OR_RETURN(made, QuantTensor::allocate(plain_, kRows, k));
    for (int64_t row = 0; row < kRows; ++row) {
      encode_row(plain_, matrix.w.data() + row * k, k, {},
                 made.codes.data() + row * made.row_bytes());
    }
  }
  return &rows_.emplace(std::pair(k, kind), std::move(made)).first->second;
}

Result<QuantTensor> DummyWeights::repeated(const QuantTensor& rows, int64_t n) {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor out, QuantTensor::allocate(rows.format, n, rows.k));
  repeat(rows.codes, out.codes, pool_);
  repeat(rows.scales, out.scales, pool_);
  repeat(rows.zeros, out.zeros, pool_);
  return out;
}

Result<MappedLinear> DummyWeights::linear(const std::string& module, int64_t n, int64_t k) {
  const bool coded = scheme_.weight.quantized() && !plains_.contains(module);
  auto rows = rows_of(k, coded ? Kind::kCoded : Kind::kPlain);
  NIBBLE_RETURN_IF_ERROR(rows.status().with_context(module));
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, repeated(**rows, n));
  MappedLinear linear;
  linear.weight = view_of(weight);
  linear.weight.name = module;
  linear.act = !coded                   ? ActSpec()
               : in_blocks(scheme_.act) ? bench_act(scheme_, k, kFourBitShare)
                                        : ActSpec(scheme_.act);
  linear.codes = std::move(weight.codes);
  linear.scales = std::move(weight.scales);
  linear.zeros = std::move(weight.zeros);
  linear.minimums = std::move(weight.minimums);
  return linear;
}

Result<std::vector<float>> DummyWeights::numbers(const std::string& tensor,
                                                 const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) {
    count *= extent;
  }
  const bool weights = tensor.ends_with(".weight");
  if (weights && shape.size() > 1) {  // the gate of an expert that every token takes
    return gaussian(count, random_);
  }
  return std::vector<float>(static_cast<size_t>(count), weights ? 1.0F : 0.0F);
}

}  // namespace nibble
