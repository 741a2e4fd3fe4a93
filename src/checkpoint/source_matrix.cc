#include "checkpoint/source_matrix.h"

#include <string_view>

#include "checkpoint/source_plain.h"

namespace nibble {

Result<SourceModel> list_source_matrices(const CheckpointReader& reader,
                                         [[maybe_unused]] const Json& config) {
  constexpr std::string_view kSuffix = ".weight";
  SourceModel model;
  for (const TensorInfo* tensor : reader.tensors()) {
    const std::string_view name = tensor->name;
    if (name.ends_with(kSuffix) && is_plain_matrix(*tensor)) {
      const std::string_view module = name.substr(0, name.size() - kSuffix.size());
      model.matrices.push_back(make_plain_source(reader, *tensor, std::string(module)));
    } else {
      model.others.push_back(tensor);
    }
  }
  return model;
}

}  // namespace nibble
