#include "quantizer/own_head.h"

#include <algorithm>
#include <string>
#include <utility>

#include "arch/family.h"
#include "checkpoint/source_plain.h"
#include "quantizer/module_kind.h"

namespace nibble {
namespace {

constexpr const char* kTied = "tie_word_embeddings";

}  // namespace

const SourceMatrix* find_head(const Json& config, const SourceModel& model) {
  const Family* family = guess_family(config);
  const auto found = std::ranges::find_if(model.matrices, [&](const auto& matrix) {
    return family != nullptr ? role_of(*family, matrix->module()) == Role::kHead
                             : module_kind(matrix->module(), 0) == ModuleKind::kHead;
  });
  return found == model.matrices.end() ? nullptr : found->get();
}

Result<const SourceMatrix*> add_tied_head(const CheckpointReader& reader,
                                          const Json& config,
                                          SourceModel& model) {
  if (find_head(config, model) != nullptr) {
    return nullptr;
  }
  const Family* family = guess_family(config);
  if (family == nullptr) {
    return make_error(StatusCode::kInvalidArgument,
                      "--lm-head: {} stores no output head, and its architecture is not known, so "
                      "that nothing says which table it shares; leave --lm-head out",
                      reader.path());
  }
  const std::string table = module_name(*family, Role::kEmbedding);
  const TensorInfo* tensor = reader.find(table + ".weight");
  if (tensor == nullptr || !is_plain_matrix(*tensor)) {
    return make_error(StatusCode::kUnsupported,
                      "--lm-head: {} stores neither an output head nor a table {}.weight in F32, "
                      "F16 or BF16 that could be one; leave --lm-head out",
                      reader.path(), table);
  }
  model.matrices.push_back(make_plain_source(reader, *tensor, module_name(*family, Role::kHead)));
  return model.matrices.back().get();
}

Json with_own_head(Json config) {
  Json* text = config.as_object().find("text_config");
  const bool nested = text != nullptr && text->is_object();
  if (nested) {
    text->set(kTied, false);
  }
  if (!nested || config.find(kTied) != nullptr) {
    config.set(kTied, false);
  }
  return config;
}

}  // namespace nibble
