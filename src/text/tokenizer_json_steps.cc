#include "text/tokenizer_json_steps.h"

#include <functional>

namespace nibble::internal {
namespace {

Status unsupported_step(const std::string& where, const std::string& type) {
  return make_error(StatusCode::kUnsupported, "{}: field type: step '{}' is not supported", where,
                    type);
}

// The elements of a Sequence; `field` names the list.
Status for_each_step(const Json& json,
                     std::string_view field,
                     const std::string& where,
                     const std::function<Status(const Json&, const std::string&)>& visit) {
  const Json* list = json.find(field);
  if (list == nullptr || !list->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: expected an array", where, field);
  }
  size_t index = 0;
  for (const Json& step : list->as_array()) {
    NIBBLE_RETURN_IF_ERROR(visit(step, fmt::format("{}.{}[{}]", where, field, index++)));
  }
  return {};
}

// {"String": text} or {"Regex": text}.
struct Pattern {
  std::string text;
  bool is_regex;
};

Result<Pattern> parse_pattern(const Json& json, const std::string& where) {
  const Json* pattern = json.find("pattern");
  for (const char* kind : {"String", "Regex"}) {
    const Json* text = pattern == nullptr ? nullptr : pattern->find(kind);
    if (text != nullptr && text->is_string() && !text->as_string().empty()) {
      return Pattern{text->as_string(), std::string_view(kind) == "Regex"};
    }
  }
  return make_error(StatusCode::kCorrupt,
                    "{}: field pattern: expected an object with a String or Regex", where);
}

Result<Regex> compile_pattern(const Pattern& pattern, const std::string& where) {
  if (pattern.is_regex) {
    return Regex::compile(pattern.text, where + ": field pattern");
  }
  std::string quoted;
  for (const char c : pattern.text) {
    if (std::string_view("\\^$.[]|()?*+{}-#").find(c) != std::string_view::npos) quoted += '\\';
    quoted += c;
  }
  return Regex::compile(quoted, where + ": field pattern");
}

Result<PrependScheme> parse_prepend_scheme(const Json& json, const std::string& where) {
  const JsonReader reader(json, where);
  // Older files say add_prefix_space instead.
  NIBBLE_ASSIGN_OR_RETURN(const bool add_space, reader.optional_bool("add_prefix_space", true));
  NIBBLE_ASSIGN_OR_RETURN(const std::string scheme,
                          reader.optional_string("prepend_scheme", add_space ? "always" : "never"));
  if (scheme == "always") return PrependScheme::kAlways;
  if (scheme == "first") return PrependScheme::kFirst;
  if (scheme == "never") return PrependScheme::kNever;
  return make_error(StatusCode::kCorrupt,
                    "{}: field prepend_scheme: expected always, first or never, got '{}'", where,
                    scheme);
}

Result<std::string> parse_marker(const Json& json, const std::string& where) {
  NIBBLE_ASSIGN_OR_RETURN(std::string marker,
                          JsonReader(json, where).optional_string("replacement", "\u2581"));
  if (marker.empty()) {
    return make_error(StatusCode::kCorrupt, "{}: field replacement: is empty", where);
  }
  return marker;
}

Result<SplitBehavior> parse_behavior(const Json& json, const std::string& where) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string name,
                          JsonReader(json, where).optional_string("behavior", "Isolated"));
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return make_error(StatusCode::kCorrupt, "{}: field behavior: unknown behavior '{}'", where, name);
}

Status add_split(const Json& json, const std::string& where, PreTokenizer& pre_tokenizer) {
  NIBBLE_ASSIGN_OR_RETURN(const Pattern pattern, parse_pattern(json, where));
  NIBBLE_ASSIGN_OR_RETURN(Regex regex, compile_pattern(pattern, where));
  NIBBLE_ASSIGN_OR_RETURN(const SplitBehavior behavior, parse_behavior(json, where));
  NIBBLE_ASSIGN_OR_RETURN(const bool invert,
                          JsonReader(json, where).optional_bool("invert", false));
  pre_tokenizer.add(SplitStep{std::move(regex), behavior, invert});
  return {};
}

Status add_fixed_split(std::string_view pattern,
                       SplitBehavior behavior,
                       const std::string& where,
                       PreTokenizer& pre_tokenizer) {
  NIBBLE_ASSIGN_OR_RETURN(Regex regex, Regex::compile(pattern, where));
  pre_tokenizer.add(SplitStep{std::move(regex), behavior});
  return {};
}

Status add_byte_level(const Json& json, const std::string& where, PreTokenizer& pre_tokenizer) {
  const JsonReader reader(json, where);
  NIBBLE_ASSIGN_OR_RETURN(const bool prefix, reader.optional_bool("add_prefix_space", true));
  NIBBLE_ASSIGN_OR_RETURN(const bool use_regex, reader.optional_bool("use_regex", true));
  if (prefix) pre_tokenizer.add(PrefixSpaceStep{});
  if (use_regex) {
    return add_fixed_split(known_split_pattern("gpt2"), SplitBehavior::kIsolated, where,
                           pre_tokenizer);
  }
  return {};
}

Status add_metaspace(const Json& json, const std::string& where, PreTokenizer& pre_tokenizer) {
  MetaspaceStep step;
  NIBBLE_ASSIGN_OR_RETURN(step.marker, parse_marker(json, where));
  NIBBLE_ASSIGN_OR_RETURN(step.prepend, parse_prepend_scheme(json, where));
  NIBBLE_ASSIGN_OR_RETURN(step.split, JsonReader(json, where).optional_bool("split", true));
  pre_tokenizer.add(std::move(step));
  return {};
}

Status add_replacement(const Json& json, const std::string& where, Normalizer& normalizer) {
  NIBBLE_ASSIGN_OR_RETURN(const Pattern pattern, parse_pattern(json, where));
  NIBBLE_ASSIGN_OR_RETURN(std::string content, JsonReader(json, where).required_string("content"));
  if (!pattern.is_regex) {
    normalizer.add(ReplaceTextStep{pattern.text, std::move(content)});
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(Regex regex, compile_pattern(pattern, where));
  normalizer.add(ReplacePatternStep{std::move(regex), std::move(content)});
  return {};
}

std::optional<UnicodeStep> unicode_step(std::string_view type) {
  using Form = UnicodeStep::Form;
  if (type == "NFC") return UnicodeStep{Form::kNfc};
  if (type == "NFD") return UnicodeStep{Form::kNfd};
  if (type == "NFKC") return UnicodeStep{Form::kNfkc};
  if (type == "NFKD") return UnicodeStep{Form::kNfkd};
  return std::nullopt;
}

// TemplateProcessing: the special tokens before the sequence in "single".
Status add_template_prefix(const Json& json,
                           const std::string& where,
                           std::vector<int32_t>& prefix) {
  bool before_text = true;
  return for_each_step(json, "single", where, [&](const Json& item, const std::string& place) {
    const Json* special = item.find("SpecialToken");
    before_text = before_text && special != nullptr;
    if (!before_text) {
      return Status();
    }
    NIBBLE_ASSIGN_OR_RETURN(const std::string name,
                            JsonReader(*special, place).required_string("id"));
    const Json* table = json.find("special_tokens");
    const Json* token = table == nullptr ? nullptr : table->find(name);
    const Json* ids = token == nullptr ? nullptr : token->find("ids");
    if (ids == nullptr || !ids->is_array()) {
      return make_error(StatusCode::kCorrupt, "{}: field special_tokens: no ids for '{}'", where,
                        name);
    }
    for (const Json& id : ids->as_array()) {
      if (!id.is_int() || id.as_int() < 0 || id.as_int() > INT32_MAX) {
        return make_error(StatusCode::kCorrupt, "{}: field special_tokens.{}.ids: {} is no id",
                          where, name, id.dump());
      }
      prefix.push_back(static_cast<int32_t>(id.as_int()));
    }
    return Status();
  });
}

}  // namespace

const Json* member(const Json& object, std::string_view key) {
  const Json* found = object.find(key);
  return found == nullptr || found->is_null() ? nullptr : found;
}

std::string type_of(const Json& object) {
  const Json* type = object.find("type");
  return type != nullptr && type->is_string() ? type->as_string() : std::string();
}

Status add_normalizer_steps(const Json& json, const std::string& where, Normalizer& normalizer) {
  const std::string type = type_of(json);
  const JsonReader reader(json, where);
  if (type == "Sequence") {
    return for_each_step(json, "normalizers", where, [&](const Json& step, const std::string& at) {
      return add_normalizer_steps(step, at, normalizer);
    });
  }
  if (const auto step = unicode_step(type)) {
    normalizer.add(*step);
    return {};
  }
  if (type == "Prepend") {
    NIBBLE_ASSIGN_OR_RETURN(std::string text, reader.required_string("prepend"));
    normalizer.add(PrependStep{std::move(text)});
    return {};
  }
  if (type == "Replace") {
    return add_replacement(json, where, normalizer);
  }
  if (type == "Strip") {
    StripStep step;
    NIBBLE_ASSIGN_OR_RETURN(step.left, reader.optional_bool("strip_left", true));
    NIBBLE_ASSIGN_OR_RETURN(step.right, reader.optional_bool("strip_right", true));
    normalizer.add(step);
    return {};
  }
  return unsupported_step(where, type);
}

Result<bool> add_pre_tokenizer_steps(const Json& json,
                                     const std::string& where,
                                     PreTokenizer& pre_tokenizer) {
  const std::string type = type_of(json);
  if (type == "Sequence") {
    bool byte_level = false;
    NIBBLE_RETURN_IF_ERROR(for_each_step(
        json, "pretokenizers", where, [&](const Json& step, const std::string& at) -> Status {
          NIBBLE_ASSIGN_OR_RETURN(const bool found,
                                  add_pre_tokenizer_steps(step, at, pre_tokenizer));
          byte_level = byte_level || found;
          return {};
        }));
    return byte_level;
  }
  Status status;
  if (type == "ByteLevel") {
    status = add_byte_level(json, where, pre_tokenizer);
  } else if (type == "Split") {
    status = add_split(json, where, pre_tokenizer);
  } else if (type == "Metaspace") {
    status = add_metaspace(json, where, pre_tokenizer);
  } else if (type == "Digits") {
    NIBBLE_ASSIGN_OR_RETURN(const bool single,
                            JsonReader(json, where).optional_bool("individual_digits", false));
    status = add_fixed_split(single ? "\\p{N}" : "\\p{N}+", SplitBehavior::kIsolated, where,
                             pre_tokenizer);
  } else if (type == "WhitespaceSplit") {
    status = add_fixed_split("\\s+", SplitBehavior::kRemoved, where, pre_tokenizer);
  } else {
    status = unsupported_step(where, type);
  }
  NIBBLE_RETURN_IF_ERROR(status);
  return type == "ByteLevel";
}

Status add_decoder_steps(const Json& json, const std::string& where, DecoderSteps& decoder) {
  const std::string type = type_of(json);
  if (type == "Sequence") {
    return for_each_step(json, "decoders", where, [&](const Json& step, const std::string& at) {
      return add_decoder_steps(step, at, decoder);
    });
  }
  if (type == "ByteFallback") {
    decoder.byte_fallback = true;
    return {};
  }
  if (type == "Replace") {
    NIBBLE_ASSIGN_OR_RETURN(Pattern pattern, parse_pattern(json, where));
    NIBBLE_ASSIGN_OR_RETURN(std::string content,
                            JsonReader(json, where).required_string("content"));
    if (pattern.is_regex) {
      return make_error(StatusCode::kUnsupported, "{}: field pattern: Regex is not supported here",
                        where);
    }
    decoder.replacements.emplace_back(std::move(pattern.text), std::move(content));
    return {};
  }
  if (type == "Metaspace") {
    NIBBLE_ASSIGN_OR_RETURN(std::string marker, parse_marker(json, where));
    NIBBLE_ASSIGN_OR_RETURN(const PrependScheme scheme, parse_prepend_scheme(json, where));
    decoder.replacements.emplace_back(std::move(marker), " ");
    decoder.strip_leading_space = scheme != PrependScheme::kNever;
    return {};
  }
  if (type == "Strip") {
    const JsonReader reader(json, where);
    NIBBLE_ASSIGN_OR_RETURN(const std::string content, reader.required_string("content"));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t start, reader.optional_int("start", 0));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t stop, reader.optional_int("stop", 0));
    if (content != " " || start < 0 || start > 1 || stop != 0) {
      return make_error(StatusCode::kUnsupported,
                        "{}: Strip removes at most one leading space, not {} leading and {} "
                        "trailing '{}'",
                        where, start, stop, content);
    }
    decoder.strip_leading_space = decoder.strip_leading_space || start == 1;
    return {};
  }
  if (type == "Fuse" || type == "ByteLevel") {
    return {};
  }
  return unsupported_step(where, type);
}

Status add_prompt_prefix(const Json& json, const std::string& where, std::vector<int32_t>& prefix) {
  const std::string type = type_of(json);
  if (type == "Sequence") {
    return for_each_step(json, "processors", where, [&](const Json& step, const std::string& at) {
      return add_prompt_prefix(step, at, prefix);
    });
  }
  if (type == "TemplateProcessing") {
    return add_template_prefix(json, where, prefix);
  }
  return type == "ByteLevel" ? Status() : unsupported_step(where, type);
}

std::string decoded_piece(const DecoderSteps& decoder, const std::string& piece) {
  std::string text = piece;
  for (const auto& [from, to] : decoder.replacements) {
    text = replace_all(text, from, to);
  }
  return text;
}

}  // namespace nibble::internal
