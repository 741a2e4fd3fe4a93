#include "checkpoint/announced.h"

#include <algorithm>
#include <span>

#include "checkpoint/dialects/dialects.h"

namespace nibble {
namespace {

bool may_be_codes(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
    case DType::kC64:
    case DType::kI64:  // shapes and positions
    case DType::kU64:
      return false;
    default:
      return true;
  }
}

}  // namespace

Status check_announced(const CheckpointReader& reader, Dialect dialect, std::string_view where) {
  const bool any = std::ranges::any_of(
      reader.tensors(), [](const TensorInfo* tensor) { return may_be_codes(tensor->dtype); });
  const auto rows = all_dialects();
  const auto found =
      std::ranges::find_if(rows, [&](const DialectRow* row) { return row->dialect == dialect; });
  if (any || found == rows.end()) {
    return {};
  }
  return make_error(StatusCode::kCorrupt,
                    "{}: field quant_method: \"{}\", but {} has no quantized tensor ({}); get the "
                    "files that belong together, or remove the field quantization_config if the "
                    "weights are meant to be unquantized",
                    where, (*found)->name, reader.path(), (*found)->codes);
}

}  // namespace nibble
