#include "arch/families/families.h"

namespace nibble {

namespace {

constexpr int64_t kDefaultWindow = 4096;  // of transformers' MistralConfig

// Mistral 7B to Nemo: no biases; one window for every layer, none if the field is null.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(config.sliding_windows,
                          read_one_window(json, reader, config.num_layers, kDefaultWindow));
  return {};
}

}  // namespace

const Family kMistral = {.name = "mistral",
                         .architecture = "MistralForCausalLM",
                         .model_type = "mistral",
                         .read_fields = read_fields};

}  // namespace nibble
