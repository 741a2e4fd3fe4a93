#include "checkpoint/dialects/config_writers.h"

namespace nibble::fp8_block {

Json config_json(const StoredQuantization& stored) {
  const int size = stored.uses.front().scheme.weight.group_size;
  return Json::object(
      {{"quant_method", "fp8"},
       {"fmt", "e4m3"},
       {"activation_scheme", "dynamic"},
       {"weight_block_size", JsonArray{size, size}},
       {"modules_to_not_convert", JsonArray(stored.ignore.begin(), stored.ignore.end())}});
}

}  // namespace nibble::fp8_block
