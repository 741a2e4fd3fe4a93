#include <utility>

#include "checkpoint/source_formats.h"
#include "checkpoint/source_plain.h"

namespace nibble {
namespace {

constexpr std::string_view kGateUp = "gate_up_proj";
constexpr std::string_view kDown = "down_proj";
constexpr int64_t kBlockSize = 32;
constexpr int64_t kBlockBytes = 16;

/// One of the matrices that the rows of an expert make up.
struct Share {
  std::string_view projection;
  int64_t first = 0;  // row
  int64_t step = 1;
  int64_t rows = 0;
};

// Gate and up interleaved.
std::vector<Share> interleaved(std::string_view projection, int64_t rows) {
  if (projection == kDown) {
    return {{kDown, 0, 1, rows}};
  }
  return {{"gate_proj", 0, 2, rows / 2}, {"up_proj", 1, 2, rows / 2}};
}

std::vector<Share> halves(std::string_view projection, int64_t rows) {
  if (projection == kDown) {
    return {{kDown, 0, 1, rows}};
  }
  return {{"gate_proj", 0, 1, rows / 2}, {"up_proj", rows / 2, 1, rows / 2}};
}

std::string expert_module(std::string_view experts, int64_t expert, std::string_view projection) {
  return fmt::format("{}.{}.{}", experts, expert, projection);
}

}  // namespace

Status append_expert_blocks(const SourceContext& context,
                            const TensorInfo& blocks,
                            SourceList& out) {
  const std::string_view full = blocks.name;
  const std::string base(full.substr(0, full.size() - kBlocksSuffix.size()));
  const SplitName name = split_name(base);
  if (context.config.dialect != Dialect::kMxfp4) {
    return context.corrupt(blocks,
                           "blocks of MXFP4, but config.json has no quantization_config of "
                           "quant_method mxfp4");
  }
  if (name.suffix != kGateUp && name.suffix != kDown) {
    return context.unsupported(blocks,
                               "only gate_up_proj_blocks and down_proj_blocks are read; convert "
                               "the checkpoint to the names of transformers");
  }
  const std::vector<int64_t>& shape = blocks.shape;
  if (blocks.dtype != DType::kU8 || shape.size() != 4 || shape[0] <= 0 || shape[1] <= 0 ||
      shape[2] <= 0 || shape[3] != kBlockBytes || (name.suffix == kGateUp && shape[1] % 2 != 0)) {
    return context.corrupt(blocks, fmt::format("expected U8 [experts, rows, blocks, 16], got {} {}",
                                               dtype_name(blocks.dtype), shape_text(shape)));
  }
  const TensorInfo* scales = context.reader.find(base + std::string(kScalesSuffix));
  if (scales == nullptr) {
    return context.corrupt(blocks, fmt::format("{}{} is missing", base, kScalesSuffix));
  }
  NIBBLE_RETURN_IF_ERROR(context.expect(*scales, DType::kU8, {shape[0], shape[1], shape[2]}));
  const int64_t row_bytes = shape[2] * kBlockBytes;
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    for (const Share& share : interleaved(name.suffix, shape[1])) {
      const int64_t first = expert * shape[1] + share.first;
      CodedFacts facts;
      facts.module = expert_module(name.module, expert, share.projection);
      facts.format = "MXFP4";
      facts.n = share.rows;
      facts.k = shape[2] * kBlockSize;
      facts.group_size = kBlockSize;
      facts.codes = {.tensor = &blocks,
                     .form = CodeForm::kE2M1,
                     .offset = first * row_bytes,
                     .row_bytes = share.step * row_bytes};
      facts.scale = {.tensor = scales,
                     .offset = first * shape[2],
                     .row_stride = share.step * shape[2],
                     .group_stride = 1};
      out.push_back(make_coded_source(context.reader, std::move(facts)));
    }
  }
  return {};
}

bool is_fused_experts(const TensorInfo& tensor, const FusedModel& model) {
  const SplitName name = split_name(tensor.name);
  return is_plain(tensor.dtype) && tensor.shape.size() == 3 && name.module.ends_with(".experts") &&
         (name.suffix == kGateUp || name.suffix == kDown) && tensor.elements() > 0 &&
         model.family != nullptr && model.family->fused.has_value();
}

Status append_fused_experts(const SourceContext& context,
                            const TensorInfo& tensor,
                            const FusedModel& model,
                            SourceList& out) {
  const SplitName name = split_name(tensor.name);
  const FusedExperts& layout = *model.family->fused;
  const int64_t rows = tensor.shape[layout.transposed ? 2 : 1];
  const int64_t columns = tensor.shape[layout.transposed ? 1 : 2];
  const bool gate_up = name.suffix == kGateUp;
  if ((gate_up ? columns : rows) != model.hidden_size || (gate_up && rows % 2 != 0)) {
    return context.corrupt(
        tensor, fmt::format("shape {} does not fit {} with hidden_size {}",
                            shape_text(tensor.shape), model.family->name, model.hidden_size));
  }
  const auto shares =
      layout.interleaved ? interleaved(name.suffix, rows) : halves(name.suffix, rows);
  const int64_t row_stride = layout.transposed ? 1 : columns;
  for (int64_t expert = 0; expert < tensor.shape[0]; ++expert) {
    for (const Share& share : shares) {
      const PlainLayout plain{.tensor = &tensor,
                              .n = share.rows,
                              .k = columns,
                              .offset = expert * rows * columns + share.first * row_stride,
                              .row_stride = share.step * row_stride,
                              .column_stride = layout.transposed ? rows : 1};
      out.push_back(make_plain_source(context.reader, plain,
                                      expert_module(name.module, expert, share.projection)));
    }
  }
  return {};
}

}  // namespace nibble
