#include "checkpoint/kv_sidecar.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <span>
#include <utility>

#include <unistd.h>

#include "arch/family.h"
#include "base/file.h"
#include "base/json_number.h"
#include "checkpoint/sidecar_errors.h"
#include "checkpoint/weights_digest.h"
#include "gguf/split.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRemedy = "make it again with nibble calibrate-kv, or remove it";
constexpr float kMost = 1e9F;  // far above any key or value; sums of products with it stay finite

constexpr SidecarErrors kErrors(kRemedy);

/// Null where a member is absent, too.
const Json* find_member(const Json& json, std::string_view field) {
  const Json* member = json.find(field);
  return member == nullptr || member->is_null() ? nullptr : member;
}

Json json_of(const std::vector<float>& numbers) {
  if (numbers.empty()) {
    return {};
  }
  JsonArray out;
  std::ranges::transform(numbers, std::back_inserter(out), shortest_number);
  return out;
}

Json json_of(const KvSidecar::Ranges& ranges) {
  return Json::object({{"form", head_form_name({.turned = ranges.turned})},
                       {"mean", json_of(ranges.mean)},
                       {"step", json_of(ranges.step)}});
}

Json json_of(const KvSidecar::Half& half) {
  Json errors = Json(JsonObject());
  for (const HeadForm form : kHeadForms) {
    if (const double error = half.errors.at(head_form_index(form)); error >= 0) {
      errors.set(std::string(head_form_name(form)), error);
    }
  }
  Json out = Json::object({{"form", head_form_name(half.form)},
                           {"errors", std::move(errors)},
                           {"mean", json_of(half.mean)}});
  if (half.page_form) {
    out.set("page_form", head_form_name(*half.page_form));
  }
  if (half.ranges) {
    out.set("ranges", json_of(*half.ranges));
  }
  return out;
}

/// What is read, and where.
struct Place {
  std::string where;
  int64_t count;  // numbers of a half
};

/// Empty where it is absent or null.
Result<std::vector<float>> read_numbers(const Json& half,
                                        const Place& place,
                                        std::string_view field) {
  const auto& [where, count] = place;
  const Json* json = find_member(half, field);
  if (json == nullptr) {
    return std::vector<float>();
  }
  if (!json->is_array()) {
    return kErrors.bad_field(where, field,
                             fmt::format("expected an array, got {}", json_type_name(*json)));
  }
  const JsonArray& numbers = json->as_array();
  if (std::ssize(numbers) != count) {
    return kErrors.bad_field(
        where, field,
        fmt::format("has {} numbers, but kv_heads x head_dim of the model are {}", numbers.size(),
                    count));
  }
  std::vector<float> out;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const bool number = numbers[i].is_number();
    const auto value = number ? static_cast<float>(numbers[i].as_double()) : 0.0F;
    if (!number || !(std::abs(value) <= kMost)) {
      return kErrors.bad_field(
          where, fmt::format("{}[{}]", field, i),
          fmt::format("expected a number of up to {:g}, got {}", kMost, numbers[i].dump()));
    }
    out.push_back(value);
  }
  return out;
}

Result<HeadForm> read_form(const Json& json, const Place& place, std::string_view field) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string name,
                          JsonReader(json, place.where).required_string(field));
  const std::optional<HeadForm> form = find_head_form(name);
  if (!form) {
    return kErrors.bad_field(
        place.where, field,
        fmt::format("\"{}\" is none of plain, centred, turned and centred+turned", name));
  }
  return *form;
}

/// Refuses a form that needs a mean where there is none.
Status check_mean(const KvSidecar::Half& half, HeadForm form, const std::string& where) {
  return form.centred && half.mean.empty()
             ? kErrors.bad_field(
                   where, "mean",
                   fmt::format("is missing, which the form {} needs", head_form_name(form)))
             : Status();
}

Result<KvSidecar::Ranges> read_ranges(const Json& json, const Place& place) {
  if (!json.is_object()) {
    return kErrors.bad_field(place.where, "ranges",
                             fmt::format("expected an object, got {}", json_type_name(json)));
  }
  const Place here{place.where + ": ranges", place.count};
  NIBBLE_ASSIGN_OR_RETURN(const HeadForm form, read_form(json, here, "form"));
  KvSidecar::Ranges ranges{.turned = form.turned};
  if (form.centred) {
    return kErrors.bad_field(here.where, "form",
                             "ranges are plain or turned: they have a mean anyway");
  }
  NIBBLE_ASSIGN_OR_RETURN(ranges.mean, read_numbers(json, here, "mean"));
  NIBBLE_ASSIGN_OR_RETURN(ranges.step, read_numbers(json, here, "step"));
  if (ranges.step.empty()) {
    return kErrors.bad_field(here.where, "step", "is missing");
  }
  if (std::ranges::any_of(ranges.step, [](float step) { return step < 0; })) {
    return kErrors.bad_field(here.where, "step", "has a negative number");
  }
  return ranges;
}

Result<KvSidecar::Half> read_half(const Json& layer,
                                  const std::string& where,
                                  std::string_view name,
                                  int64_t count) {
  const Json* json = layer.find(name);
  if (json == nullptr || !json->is_object()) {
    return kErrors.bad_field(where, name, "is missing, or no object");
  }
  const Place here{fmt::format("{}: {}", where, name), count};
  KvSidecar::Half half;
  NIBBLE_ASSIGN_OR_RETURN(half.form, read_form(*json, here, "form"));
  NIBBLE_ASSIGN_OR_RETURN(half.mean, read_numbers(*json, here, "mean"));
  NIBBLE_RETURN_IF_ERROR(check_mean(half, half.form, here.where));
  if (find_member(*json, "page_form") != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(half.page_form, read_form(*json, here, "page_form"));
    NIBBLE_RETURN_IF_ERROR(check_mean(half, *half.page_form, here.where));
  }
  if (const Json* ranges = find_member(*json, "ranges")) {
    NIBBLE_ASSIGN_OR_RETURN(half.ranges, read_ranges(*ranges, here));
  }
  return half;
}

Status check_number(const JsonReader& reader, std::string_view field, int64_t expected) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t number, reader.required_int(field));
  return number == expected
             ? Status()
             : kErrors.bad_field(reader.where(), field,
                                 fmt::format("is {}, but {} in the model", number, expected));
}

std::string forms_text(const KvSidecar& sidecar, KvSidecar::Half KvSidecar::Layer::*half) {
  std::string text;
  for (const HeadForm form : kHeadForms) {
    const auto count = std::ranges::count_if(
        sidecar.layers, [&](const KvSidecar::Layer& layer) { return (layer.*half).form == form; });
    if (count > 0) {
      text += fmt::format("{}{} in {}{}", text.empty() ? "" : ", ", head_form_name(form), count,
                          !text.empty() ? ""
                          : count == 1  ? " layer"
                                        : " layers");
    }
  }
  return text;
}

/// What of a layer cannot be where attention has sinks: neither do their logits move with those of
/// centred keys, nor do the weights of centred values add up to 1.
Status check_sinks(const KvSidecar::Layer& layer, const std::string& where) {
  for (const KvSidecar::Half* half : {&layer.keys, &layer.values}) {
    const auto refuse = [&](std::string_view what) {
      return make_error(StatusCode::kUnsupported,
                        "{}: {}: {} where attention has sinks, which no mean may be taken off; {}",
                        where, half == &layer.keys ? "keys" : "values", what, kRemedy);
    };
    if (half->form.centred) {
      return refuse("field form: cannot be centred");
    }
    if (half->page_form && half->page_form->centred) {
      return refuse("field page_form: cannot be centred");
    }
    if (half->ranges && !half->ranges->mean.empty()) {
      return refuse("ranges: field mean: there can be none");
    }
  }
  return {};
}

Result<KvSidecar> read_sidecar(const Json& json,
                               const std::string& where,
                               const KvSidecarShape& shape) {
  const JsonReader reader(json, where);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t version, reader.required_int("nibble_kv"));
  if (version != kKvSidecarVersion) {
    return make_error(StatusCode::kUnsupported, "{}: field nibble_kv: is version {}, not {}; {}",
                      where, version, kKvSidecarVersion, kRemedy);
  }
  NIBBLE_RETURN_IF_ERROR(check_number(reader, "kv_heads", shape.kv_heads));
  NIBBLE_RETURN_IF_ERROR(check_number(reader, "head_dim", shape.head_dim));
  const Json* layers = json.find("layers");
  if (layers == nullptr || !layers->is_array()) {
    return kErrors.bad_field(where, "layers", "is missing, or no array");
  }
  if (std::ssize(layers->as_array()) != shape.layers) {
    return kErrors.bad_field(where, "layers",
                             fmt::format("has {} entries, but the model has {} layers",
                                         layers->as_array().size(), shape.layers));
  }
  KvSidecar sidecar;
  NIBBLE_ASSIGN_OR_RETURN(sidecar.weights, reader.optional_string("weights_xxh64", ""));
  if (const Json* calibration = json.find("calibration")) {
    sidecar.calibration = *calibration;
  }
  for (const Json& layer : layers->as_array()) {
    const std::string here = fmt::format("{}: layers[{}]", where, sidecar.layers.size());
    const int64_t count = shape.kv_heads * shape.head_dim;
    KvSidecar::Layer& read = sidecar.layers.emplace_back();
    NIBBLE_ASSIGN_OR_RETURN(read.keys, read_half(layer, here, "keys", count));
    NIBBLE_ASSIGN_OR_RETURN(read.values, read_half(layer, here, "values", count));
    if (shape.sinks) {
      NIBBLE_RETURN_IF_ERROR(check_sinks(read, here));
    }
  }
  return sidecar;
}

}  // namespace

std::string kv_weights_digest(const CheckpointReader& weights, const ModelConfig& config) {
  std::vector<std::string> modules;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    modules.push_back(module_name(*config.family, Role::kKey, layer));
    modules.push_back(module_name(*config.family, Role::kValue, layer));
  }
  return modules_digest(weights, modules);
}

KvSidecarShape kv_sidecar_shape(const ModelConfig& config) {
  return {.layers = config.num_layers,
          .kv_heads = config.num_kv_heads,
          .head_dim = config.head_dim,
          .sinks = config.sinks};
}

std::string kv_sidecar_path(const std::string& model) {
  return gguf::is_gguf_path(model) ? fmt::format("{}.{}", model, kKvSidecarName)
                                   : fmt::format("{}/{}", model, kKvSidecarName);
}

Result<KvSidecar> read_kv_sidecar(const std::string& path, const KvSidecarShape& shape) {
  const std::string where(file_name(path));
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const auto json = Json::parse(text);
  auto sidecar = json.ok() ? read_sidecar(*json, where, shape)
                           : Result<KvSidecar>(json.status().with_context(where));
  return sidecar.ok() ? std::move(sidecar) : kErrors.with_remedy(sidecar.status());
}

Status write_kv_sidecar(const KvSidecar& sidecar,
                        const KvSidecarShape& shape,
                        const std::string& path) {
  JsonArray layers;
  for (const KvSidecar::Layer& layer : sidecar.layers) {
    layers.push_back(
        Json::object({{"keys", json_of(layer.keys)}, {"values", json_of(layer.values)}}));
  }
  const Json json =
      Json::object({{"nibble_kv", kKvSidecarVersion},
                    {"kv_heads", shape.kv_heads},
                    {"head_dim", shape.head_dim},
                    {"weights_xxh64", sidecar.weights.empty() ? Json() : Json(sidecar.weights)},
                    {"calibration", sidecar.calibration},
                    {"layers", std::move(layers)}});
  const std::string fresh = fmt::format("{}.tmp-{}", path, ::getpid());
  std::error_code ignored;
  fs::remove(fresh, ignored);
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(fresh));
  Status written = file.write(json.dump() + "\n");
  written = written.ok() ? file.finish() : written;
  if (written.ok() && std::rename(fresh.c_str(), path.c_str()) != 0) {
    written = file_error(fresh, "rename", errno);
  }
  if (!written.ok()) {
    fs::remove(fresh, ignored);
    return written;
  }
  const std::string folder = fs::path(path).parent_path().string();
  return sync_directory(folder.empty() ? "." : folder);
}

bool has_ranges(const KvSidecar& sidecar) {
  return std::ranges::all_of(sidecar.layers, [](const KvSidecar::Layer& layer) {
    return layer.keys.ranges.has_value() && layer.values.ranges.has_value();
  });
}

std::string describe(const KvSidecar& sidecar) {
  return fmt::format("keys {}; values {}", forms_text(sidecar, &KvSidecar::Layer::keys),
                     forms_text(sidecar, &KvSidecar::Layer::values));
}

}  // namespace nibble
