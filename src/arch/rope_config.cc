#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <tuple>

#include "arch/family.h"

namespace nibble {

namespace {

constexpr double kDefaultTheta = 10000.0;

Status check_known_fields(const Json& rope, const JsonReader& reader) {
  // Fields of longrope and of the multimodal form are absent here: they change the rotation.
  static constexpr std::array<std::string_view, 15> kKnown = {"rope_type",
                                                              "type",
                                                              "rope_theta",
                                                              "factor",
                                                              "low_freq_factor",
                                                              "high_freq_factor",
                                                              "original_max_position_embeddings",
                                                              "attention_factor",
                                                              "beta_fast",
                                                              "beta_slow",
                                                              "mscale",
                                                              "mscale_all_dim",
                                                              "truncate",
                                                              "partial_rotary_factor",
                                                              "finetuned"};
  for (const auto& [key, value] : rope.as_object()) {
    bool known = value.is_null();
    for (const std::string_view name : kKnown) {
      known = known || name == key;
    }
    if (!known) {
      return make_error(StatusCode::kUnsupported, "{}: field {} is not known to this build",
                        reader.where(), key);
    }
  }
  return {};
}

Status check_full_rotation(const JsonReader& reader) {
  NIBBLE_ASSIGN_OR_RETURN(const double part, reader.optional_double("partial_rotary_factor", 1.0));
  if (part != 1.0) {
    return make_error(StatusCode::kUnsupported,
                      "{}: field partial_rotary_factor: {} is not supported, only 1",
                      reader.where(), part);
  }
  return {};
}

Result<RopeKind> parse_kind(const Json& rope, const JsonReader& reader) {
  if (rope.find("type") == nullptr && rope.find("rope_type") == nullptr &&
      rope.find("factor") != nullptr) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field rope_type is missing beside factor; take both from the published "
                      "config.json",
                      reader.where());
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string old_name, reader.optional_string("type", "default"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, reader.optional_string("rope_type", old_name));
  struct Entry {
    std::string_view name;
    RopeKind kind;
  };
  static constexpr std::array kKinds = {
      Entry{"default", RopeKind::kDefault}, Entry{"linear", RopeKind::kLinear},
      Entry{"dynamic", RopeKind::kDynamicNtk}, Entry{"llama3", RopeKind::kLlama3},
      Entry{"yarn", RopeKind::kYarn}};
  for (const Entry& entry : kKinds) {
    if (entry.name == name) {
      return entry.kind;
    }
  }
  return make_error(StatusCode::kUnsupported,
                    "{}: field rope_type: \"{}\" is not known to this build; default, linear, "
                    "dynamic, llama3 and yarn are",
                    reader.where(), name);
}

/// What YaRN multiplies logarithms by: 1 or little else in published models, or absent.
Result<double> read_mscale(const JsonReader& reader, std::string_view field) {
  constexpr double kMost = 100;
  NIBBLE_ASSIGN_OR_RETURN(const double value, reader.optional_double(field, 0.0));
  if (!(value >= 0.0 && value <= kMost)) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field {}: {} is not between 0 and {}; take it from the published "
                      "config.json",
                      reader.where(), field, value, kMost);
  }
  return value;
}

/// The factor on cos and sin that YaRN derives when the file gives none.
Result<double> yarn_attention_factor(const JsonReader& reader, double factor) {
  NIBBLE_ASSIGN_OR_RETURN(const double given, reader.optional_double("attention_factor", 0.0));
  NIBBLE_ASSIGN_OR_RETURN(const double mscale, read_mscale(reader, "mscale"));
  NIBBLE_ASSIGN_OR_RETURN(const double all_dim, read_mscale(reader, "mscale_all_dim"));
  const auto magnitude = [factor](double scale) {
    return factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
  };
  if (given != 0.0) {
    return given;
  }
  return mscale != 0.0 && all_dim != 0.0 ? magnitude(mscale) / magnitude(all_dim) : magnitude(1.0);
}

/// Keeps the frequencies finite; no published model is near either end.
Status require_moderate(const JsonReader& reader, std::string_view field, double value) {
  constexpr double kLimit = 1e6;
  if (!(value >= 1 / kLimit && value <= kLimit)) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {} is not between {} and {}",
                      reader.where(), field, value, 1 / kLimit, kLimit);
  }
  return {};
}

Status require_positive(const JsonReader& reader, std::string_view field, double value) {
  if (!(value > 0.0)) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {} must be positive", reader.where(),
                      field, value);
  }
  return {};
}

Status read_scaling(const JsonReader& reader, int64_t max_position, RopeConfig& rope) {
  if (rope.kind == RopeKind::kDefault) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(rope.factor, reader.required_double("factor"));
  NIBBLE_RETURN_IF_ERROR(require_moderate(reader, "factor", rope.factor));
  static constexpr std::string_view kOriginal = "original_max_position_embeddings";
  if (rope.kind == RopeKind::kLlama3) {
    NIBBLE_ASSIGN_OR_RETURN(rope.low_freq_factor, reader.required_double("low_freq_factor"));
    NIBBLE_ASSIGN_OR_RETURN(rope.high_freq_factor, reader.required_double("high_freq_factor"));
    NIBBLE_ASSIGN_OR_RETURN(rope.original_max_position, reader.required_int(kOriginal));
    NIBBLE_RETURN_IF_ERROR(require_positive(reader, "low_freq_factor", rope.low_freq_factor));
    NIBBLE_RETURN_IF_ERROR(require_positive(reader, "high_freq_factor - low_freq_factor",
                                            rope.high_freq_factor - rope.low_freq_factor));
  } else if (rope.kind == RopeKind::kYarn) {
    NIBBLE_ASSIGN_OR_RETURN(rope.beta_fast, reader.optional_double("beta_fast", rope.beta_fast));
    NIBBLE_ASSIGN_OR_RETURN(rope.beta_slow, reader.optional_double("beta_slow", rope.beta_slow));
    NIBBLE_RETURN_IF_ERROR(require_moderate(reader, "beta_fast", rope.beta_fast));
    NIBBLE_RETURN_IF_ERROR(require_moderate(reader, "beta_slow", rope.beta_slow));
    if (rope.beta_fast < rope.beta_slow) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field beta_fast: {} is below beta_slow {}; take both from the "
                        "published config.json",
                        reader.where(), rope.beta_fast, rope.beta_slow);
    }
    NIBBLE_ASSIGN_OR_RETURN(rope.original_max_position,
                            reader.optional_int(kOriginal, max_position));
    NIBBLE_ASSIGN_OR_RETURN(rope.truncate, reader.optional_bool("truncate", true));
    NIBBLE_ASSIGN_OR_RETURN(rope.attention_factor, yarn_attention_factor(reader, rope.factor));
    NIBBLE_RETURN_IF_ERROR(require_moderate(reader, "attention_factor", rope.attention_factor));
  }
  return require_positive(reader, kOriginal, static_cast<double>(rope.original_max_position));
}

/// One of the two objects that say it, over what is known already.
Status read_object(const Json& fields,
                   const JsonReader& nested,
                   int64_t max_position,
                   RopeConfig& rope) {
  NIBBLE_RETURN_IF_ERROR(check_known_fields(fields, nested));
  NIBBLE_RETURN_IF_ERROR(check_full_rotation(nested));
  NIBBLE_ASSIGN_OR_RETURN(rope.theta, nested.optional_double("rope_theta", rope.theta));
  NIBBLE_ASSIGN_OR_RETURN(rope.kind, parse_kind(fields, nested));
  return read_scaling(nested, max_position, rope);
}

bool are_equal(const RopeConfig& a, const RopeConfig& b) {
  const auto fields = [](const RopeConfig& rope) {
    return std::tie(rope.kind, rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor,
                    rope.beta_fast, rope.beta_slow, rope.attention_factor, rope.truncate,
                    rope.original_max_position);
  };
  return fields(a) == fields(b);
}

}  // namespace

Result<RopeConfig> read_rope_config(const Json& json,
                                    const JsonReader& reader,
                                    int64_t max_position) {
  RopeConfig rope;
  rope.original_max_position = max_position;
  NIBBLE_RETURN_IF_ERROR(check_full_rotation(reader));
  NIBBLE_ASSIGN_OR_RETURN(rope.theta, reader.optional_double("rope_theta", kDefaultTheta));
  const RopeConfig plain = rope;
  bool found = false;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {  // the newer name first
    const Json* fields = json.find(key);
    if (fields == nullptr || fields->is_null()) {
      continue;
    }
    if (!fields->is_object()) {
      return make_error(StatusCode::kCorrupt, "{}: field {}: expected an object", reader.where(),
                        key);
    }
    RopeConfig read = plain;
    read.theta = rope.theta;  // the older one has none
    NIBBLE_RETURN_IF_ERROR(read_object(
        *fields, JsonReader(*fields, reader.where() + ": field " + key), max_position, read));
    if (found && !are_equal(rope, read)) {
      return make_error(StatusCode::kCorrupt,
                        "{}: fields rope_parameters and rope_scaling contradict each other; remove "
                        "the one that is not the published config.json's",
                        reader.where());
    }
    rope = read;
    found = true;
  }
  if (!(rope.theta > 1.0)) {
    return make_error(StatusCode::kCorrupt, "{}: field rope_theta: {} must be above 1",
                      reader.where(), rope.theta);
  }
  return rope;
}

}  // namespace nibble
