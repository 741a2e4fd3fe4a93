#include <cstddef>
#include <cstdint>
#include <string_view>

#include "checkpoint/quant_config.h"

// Any text either is refused, or gives groups that can be asked.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto json = nibble::Json::parse({reinterpret_cast<const char*>(data), size});
  if (!json.ok()) {
    return 0;
  }
  const auto config = nibble::parse_quant_config(*json, "config.json");
  if (config.ok()) {
    static_cast<void>(config->group_for("model.layers.0.mlp.up_proj"));
    static_cast<void>(config->ignores("lm_head"));
  }
  return 0;
}
