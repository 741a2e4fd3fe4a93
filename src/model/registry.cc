#include <array>
#include <string>

#include "model/architecture.h"

namespace nibble {

Result<const Architecture*> find_architecture(std::string_view name, std::string_view where) {
  static constexpr std::array kArchitectures = {&kLlamaArchitecture, &kMistralArchitecture,
                                                &kQwen2Architecture, &kQwen3Architecture};
  std::string known;
  for (const Architecture* architecture : kArchitectures) {
    if (architecture->name == name) {
      return architecture;
    }
    known += known.empty() ? "" : ", ";
    known += architecture->name;
  }
  return make_error(StatusCode::kUnsupported,
                    "{}: field architectures: \"{}\" is not known to this build; it runs {}", where,
                    name, known);
}

}  // namespace nibble
