#include "quant/kv_formats.h"

namespace nibble {

std::string kv_code_names(std::span<const KvCode> codes) {
  std::string names;
  for (const KvCode code : codes) {
    names += names.empty() ? "" : ", ";
    names += kv_code_name(code);
  }
  return names;
}

}  // namespace nibble
