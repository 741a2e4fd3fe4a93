#include "model/blocks.h"

#include <string_view>

namespace nibble {

Status check_blocks(const ModelConfig& config) {
  std::string_view missing;
  if (config.latent.kv_rank > 0) {
    missing = "latent attention";
  }
  return missing.empty() ? Status()
                         : make_error(StatusCode::kUnsupported,
                                      "config.json: field architectures: \"{}\" is known, but this "
                                      "build does not compute {}; it can be quantized",
                                      config.architecture, missing);
}

}  // namespace nibble
