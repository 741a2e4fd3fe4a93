#include "checkpoint/linear_repack.h"

#include <utility>

#include "checkpoint/source_formats.h"

namespace nibble {
namespace {

const TensorInfo* find_codes(const CheckpointReader& reader,
                             const QuantConfig& config,
                             const std::string& module) {
  const bool quark = config.source.method == SourceMethod::kQuark;
  if (!quark && config.source.method != SourceMethod::kGptq) {
    return nullptr;
  }
  const TensorInfo* codes = reader.find(module + (quark ? ".weight" : ".qweight"));
  return codes != nullptr && codes->dtype == DType::kI32 ? codes : nullptr;
}

}  // namespace

bool is_repacked(const CheckpointReader& reader,
                 const QuantConfig& config,
                 const std::string& module) {
  return find_codes(reader, config, module) != nullptr;
}

Result<MappedLinear> map_repacked(const CheckpointReader& reader,
                                  const QuantConfig& config,
                                  const std::string& module) {
  const TensorInfo* codes = find_codes(reader, config, module);
  const SourceContext context{reader, config.source};
  NIBBLE_ASSIGN_OR_RETURN(const CodedFacts facts, config.source.method == SourceMethod::kQuark
                                                      ? weight_facts(context, *codes, module)
                                                      : word_facts(context, *codes, module));
  const QuantGroup* group = config.group_for(module);
  if (group == nullptr) {
    return context.corrupt(*codes, fmt::format("no group of {} targets it", config.source.where));
  }
  MappedLinear linear;
  linear.act = group->act;
  NIBBLE_ASSIGN_OR_RETURN(MappedInt4 mapped, map_int4(reader, facts));
  linear.repacked = std::move(mapped.repacked);
  linear.scales = std::move(mapped.scales);
  linear.weight = {.format = group->weight,
                   .n = facts.n,
                   .k = facts.k,
                   .codes = mapped.codes,
                   .nibbles = mapped.nibbles,
                   .scales = linear.scales.data(),
                   .scale_type = DType::kF32,
                   .scale_count = QuantView::Scales::kEach,
                   .name = reader.where(*codes)};
  return linear;
}

}  // namespace nibble
