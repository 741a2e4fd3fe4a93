#include <string>

#include "arch/family.h"

namespace nibble {

namespace {

Result<std::vector<int64_t>> windows_from_types(const JsonArray& types,
                                                int64_t window,
                                                const JsonReader& reader) {
  std::vector<int64_t> windows;
  for (const Json& type : types) {
    const std::string name = type.is_string() ? type.as_string() : type.dump();
    if (name != "full_attention" && name != "sliding_attention") {
      return make_error(StatusCode::kUnsupported,
                        "{}: field layer_types: \"{}\" is not known; full_attention and "
                        "sliding_attention are",
                        reader.where(), name);
    }
    const bool slides = name == "sliding_attention";
    if (slides && window == 0) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field layer_types: sliding_attention without sliding_window and "
                        "use_sliding_window",
                        reader.where());
    }
    windows.push_back(slides ? window : 0);
  }
  return windows;
}

// layer_types, nullptr when the file has none.
Result<const JsonArray*> layer_types(const Json& json,
                                     const JsonReader& reader,
                                     int64_t num_layers) {
  const Json* types = json.find("layer_types");
  if (types == nullptr || types->is_null()) {
    return nullptr;
  }
  if (!types->is_array() || static_cast<int64_t>(types->as_array().size()) != num_layers) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field layer_types: expected one entry for each of {} layers",
                      reader.where(), num_layers);
  }
  return &types->as_array();
}

}  // namespace

Result<std::vector<int64_t>> read_qwen_windows(const Json& json,
                                               const JsonReader& reader,
                                               int64_t num_layers) {
  static constexpr int64_t kDefaultWindow = 4096;  // defaults of transformers' Qwen2Config
  static constexpr int64_t kDefaultFirst = 28;
  NIBBLE_ASSIGN_OR_RETURN(const bool use_window, reader.optional_bool("use_sliding_window", false));
  const Json* window_field = json.find("sliding_window");
  const bool window_is_null = window_field != nullptr && window_field->is_null();
  NIBBLE_ASSIGN_OR_RETURN(int64_t window, reader.optional_int("sliding_window", kDefaultWindow));
  if (use_window && !window_is_null && window < 1) {
    return make_error(StatusCode::kCorrupt, "{}: field sliding_window: {} is no window",
                      reader.where(), window);
  }
  window = use_window && !window_is_null ? window : 0;
  NIBBLE_ASSIGN_OR_RETURN(const JsonArray* types, layer_types(json, reader, num_layers));
  if (types != nullptr) {
    return windows_from_types(*types, window, reader);
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t first,
                          reader.optional_int("max_window_layers", kDefaultFirst));
  std::vector<int64_t> windows;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    windows.push_back(layer >= first ? window : 0);
  }
  return windows;
}

Result<std::vector<int64_t>> read_one_window(const Json& json,
                                             const JsonReader& reader,
                                             int64_t num_layers,
                                             int64_t fallback) {
  const Json* field = json.find("sliding_window");
  int64_t window = 0;
  if (field == nullptr) {
    window = fallback;
  } else if (!field->is_null()) {
    NIBBLE_ASSIGN_OR_RETURN(window, reader.required_int("sliding_window"));
    if (window < 1) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field sliding_window: {} is no window; use null for none",
                        reader.where(), window);
    }
  }
  return std::vector<int64_t>(static_cast<size_t>(num_layers), window);
}

Result<std::vector<int64_t>> read_layer_windows(const Json& json,
                                                const JsonReader& reader,
                                                int64_t num_layers) {
  static constexpr int64_t kDefaultWindow = 128;  // of transformers' GptOssConfig
  NIBBLE_ASSIGN_OR_RETURN(const int64_t window,
                          reader.optional_int("sliding_window", kDefaultWindow));
  if (window < 1) {
    return make_error(StatusCode::kCorrupt, "{}: field sliding_window: {} is no window",
                      reader.where(), window);
  }
  NIBBLE_ASSIGN_OR_RETURN(const JsonArray* types, layer_types(json, reader, num_layers));
  if (types != nullptr) {
    return windows_from_types(*types, window, reader);
  }
  std::vector<int64_t> windows;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    windows.push_back(layer % 2 == 0 ? window : 0);
  }
  return windows;
}

}  // namespace nibble
