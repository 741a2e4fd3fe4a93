#include <algorithm>
#include <charconv>
#include <optional>
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

enum class Order : uint8_t { kHalves, kInterleaved };  // of the rows of gate and up

std::vector<Share> shares_of(std::string_view tensor, int64_t rows, Order order) {
  if (tensor == kDown) {
    return {{kDown, 0, 1, rows}};
  }
  if (order == Order::kInterleaved) {
    return {{"gate_proj", 0, 2, rows / 2}, {"up_proj", 1, 2, rows / 2}};
  }
  return {{"gate_proj", 0, 1, rows / 2}, {"up_proj", rows / 2, 1, rows / 2}};
}

Order order_of(const FusedExperts& layout) {
  return layout.interleaved ? Order::kInterleaved : Order::kHalves;
}

std::string expert_module(std::string_view experts, int64_t expert, std::string_view projection) {
  return fmt::format("{}.{}.{}", experts, expert, projection);
}

/// The scales of "X_blocks", whose own shape is checked as well.
Result<const TensorInfo*> scales_of_blocks(const SourceContext& context, const TensorInfo& blocks) {
  const std::string_view full = blocks.name;
  const std::string base(full.substr(0, full.size() - kBlocksSuffix.size()));
  const std::string_view suffix = split_name(base).suffix;
  if (context.config.dialect != Dialect::kMxfp4) {
    return context.corrupt(blocks,
                           "blocks of MXFP4, but config.json has no quantization_config of "
                           "quant_method mxfp4");
  }
  if (suffix != kGateUp && suffix != kDown) {
    return context.unsupported(blocks,
                               "only gate_up_proj_blocks and down_proj_blocks are read; convert "
                               "the checkpoint to the names of transformers");
  }
  const std::vector<int64_t>& shape = blocks.shape;
  if (blocks.dtype != DType::kU8 || shape.size() != 4 || shape[0] <= 0 || shape[1] <= 0 ||
      shape[2] <= 0 || shape[3] != kBlockBytes || (suffix == kGateUp && shape[1] % 2 != 0)) {
    return context.corrupt(blocks, fmt::format("expected U8 [experts, rows, blocks, 16], got {} {}",
                                               dtype_name(blocks.dtype), shape_text(shape)));
  }
  const TensorInfo* scales = context.reader.find(base + std::string(kScalesSuffix));
  if (scales == nullptr) {
    return context.corrupt(blocks, fmt::format("{}{} is missing", base, kScalesSuffix));
  }
  NIBBLE_RETURN_IF_ERROR(context.expect(*scales, DType::kU8, {shape[0], shape[1], shape[2]}));
  return scales;
}

/// A share of an expert's rows of "X_blocks".
CodedFacts block_facts(const TensorInfo& blocks,
                       const TensorInfo& scales,
                       int64_t expert,
                       const Share& share) {
  const std::vector<int64_t>& shape = blocks.shape;
  const int64_t row_bytes = shape[2] * kBlockBytes;
  const int64_t first = expert * shape[1] + share.first;
  CodedFacts facts;
  facts.module = expert_module(split_name(blocks.name).module, expert, share.projection);
  facts.format = "MXFP4";
  facts.n = share.rows;
  facts.k = shape[2] * kBlockSize;
  facts.group_size = kBlockSize;
  facts.grouped = true;
  facts.codes = {.tensor = &blocks,
                 .form = CodeForm::kE2M1,
                 .offset = first * row_bytes,
                 .row_bytes = share.step * row_bytes};
  facts.scale = {.tensor = &scales,
                 .offset = first * shape[2],
                 .row_stride = share.step * shape[2],
                 .group_stride = 1};
  return facts;
}

std::string_view base_of_blocks(const TensorInfo& blocks) {
  const std::string_view suffix = split_name(blocks.name).suffix;
  return suffix.substr(0, suffix.size() - kBlocksSuffix.size());
}

Status check_fused(const SourceContext& context,
                   const TensorInfo& tensor,
                   const FusedModel& model) {
  const FusedExperts& layout = *model.family->fused;
  const int64_t rows = tensor.shape[layout.transposed ? 2 : 1];
  const int64_t columns = tensor.shape[layout.transposed ? 1 : 2];
  const bool gate_up = split_name(tensor.name).suffix == kGateUp;
  if ((gate_up ? columns : rows) != model.hidden_size || (gate_up && rows % 2 != 0)) {
    return context.corrupt(
        tensor, fmt::format("shape {} does not fit {} with hidden_size {}",
                            shape_text(tensor.shape), model.family->name, model.hidden_size));
  }
  return {};
}

/// A share of an expert's rows of a plain tensor of all experts.
PlainLayout fused_layout(const TensorInfo& tensor,
                         const FusedExperts& layout,
                         int64_t expert,
                         const Share& share) {
  const int64_t rows = tensor.shape[layout.transposed ? 2 : 1];
  const int64_t columns = tensor.shape[layout.transposed ? 1 : 2];
  const int64_t row_stride = layout.transposed ? 1 : columns;
  return {.tensor = &tensor,
          .n = share.rows,
          .k = columns,
          .offset = expert * rows * columns + share.first * row_stride,
          .row_stride = share.step * row_stride,
          .column_stride = layout.transposed ? rows : 1};
}

/// The module of an expert's projection, taken apart.
struct ExpertName {
  std::string_view experts;  // "model.layers.0.mlp.experts"
  int64_t expert = 0;
  std::string_view projection;  // "gate_proj"
};

std::optional<ExpertName> parse_expert(std::string_view module) {
  const SplitName last = split_name(module);
  const SplitName middle = split_name(last.module);
  ExpertName name{.experts = middle.module, .projection = last.suffix};
  const char* end = middle.suffix.data() + middle.suffix.size();
  const auto [stop, error] = std::from_chars(middle.suffix.data(), end, name.expert);
  if (error != std::errc() || stop != end || name.expert < 0) {
    return std::nullopt;
  }
  return name;
}

const Share* find_share(const std::vector<Share>& shares, std::string_view projection) {
  const auto found = std::ranges::find(shares, projection, &Share::projection);
  return found == shares.end() ? nullptr : &*found;
}

}  // namespace

Status append_expert_blocks(const SourceContext& context,
                            const TensorInfo& blocks,
                            SourceList& out) {
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scales, scales_of_blocks(context, blocks));
  const auto shares = shares_of(base_of_blocks(blocks), blocks.shape[1], Order::kInterleaved);
  for (int64_t expert = 0; expert < blocks.shape[0]; ++expert) {
    for (const Share& share : shares) {
      out.push_back(make_coded_source(context.reader, block_facts(blocks, *scales, expert, share)));
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
  NIBBLE_RETURN_IF_ERROR(check_fused(context, tensor, model));
  const SplitName name = split_name(tensor.name);
  const FusedExperts& layout = *model.family->fused;
  const auto shares =
      shares_of(name.suffix, tensor.shape[layout.transposed ? 2 : 1], order_of(layout));
  for (int64_t expert = 0; expert < tensor.shape[0]; ++expert) {
    for (const Share& share : shares) {
      out.push_back(make_plain_source(context.reader, fused_layout(tensor, layout, expert, share),
                                      expert_module(name.module, expert, share.projection)));
    }
  }
  return {};
}

Result<std::optional<ExpertPlace>> find_fused_expert(const SourceContext& context,
                                                     const std::string& module,
                                                     const FusedModel& model) {
  const std::optional<ExpertName> name = parse_expert(module);
  if (!name) {
    return std::optional<ExpertPlace>();
  }
  const std::string tensor(name->projection == kDown ? kDown : kGateUp);
  const TensorInfo* blocks = context.find(name->experts, tensor + std::string(kBlocksSuffix));
  const TensorInfo* plain = context.find(name->experts, tensor);
  const TensorInfo* found = blocks != nullptr ? blocks : plain;
  if (found == nullptr || (blocks == nullptr && !is_fused_experts(*plain, model))) {
    return std::optional<ExpertPlace>();
  }
  if (blocks != nullptr && plain != nullptr) {
    return context.corrupt(
        *blocks, fmt::format("there is also {}; the experts are described twice", plain->name));
  }
  ExpertPlace place;
  if (blocks != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scales, scales_of_blocks(context, *blocks));
    const auto shares = shares_of(tensor, blocks->shape[1], Order::kInterleaved);
    if (const Share* share = find_share(shares, name->projection)) {
      place.coded = block_facts(*blocks, *scales, name->expert, *share);
    }
  } else {
    NIBBLE_RETURN_IF_ERROR(check_fused(context, *plain, model));
    const FusedExperts& layout = *model.family->fused;
    const auto shares =
        shares_of(tensor, plain->shape[layout.transposed ? 2 : 1], order_of(layout));
    if (const Share* share = find_share(shares, name->projection)) {
      place.plain = fused_layout(*plain, layout, name->expert, *share);
    }
  }
  if (!place.coded && !place.plain) {
    return std::optional<ExpertPlace>();
  }
  if (name->expert >= found->shape[0]) {
    return context.corrupt(*found, fmt::format("has {} experts, but config.json needs expert {}",
                                               found->shape[0], name->expert));
  }
  return std::optional<ExpertPlace>(std::move(place));
}

}  // namespace nibble
