#include "arch/families/families.h"

namespace nibble {

namespace {

constexpr int64_t kDefaultWindow = 4096;  // of transformers' MistralConfig

// Mistral 7B to Nemo: no biases; one window for every layer, none if the field is null.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  const Json* field = json.find("sliding_window");
  int64_t window = 0;
  if (field == nullptr) {
    window = kDefaultWindow;
  } else if (!field->is_null()) {
    NIBBLE_ASSIGN_OR_RETURN(window, reader.required_int("sliding_window"));
    if (window < 1) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field sliding_window: {} is no window; use null for none",
                        reader.where(), window);
    }
  }
  config.sliding_windows.assign(static_cast<size_t>(config.num_layers), window);
  return {};
}

}  // namespace

const Family kMistral = {.name = "mistral",
                         .architecture = "MistralForCausalLM",
                         .model_type = "mistral",
                         .read_fields = read_fields};

}  // namespace nibble
