#include "text/tokenizer_json_steps.h"
#include "text/tokenizer_loaders.h"

namespace nibble {
namespace {

using nibble::internal::DecoderSteps;
using nibble::internal::member;
using nibble::internal::type_of;

// The model section before its pieces get their final form.
struct ModelSection {
  std::vector<std::string> pieces;  // by id, as written
  std::vector<BpeModel::Merge> merges;
  BpeOptions options;
};

Result<std::vector<std::string>> parse_vocab(const Json& model, std::string_view where) {
  const Json* vocab = model.find("vocab");
  if (vocab == nullptr || !vocab->is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: field model.vocab: expected an object", where);
  }
  std::vector<std::string> pieces;
  for (const auto& [piece, id] : vocab->as_object()) {
    if (!id.is_int() || id.as_int() < 0 || id.as_int() >= kTokenIdLimit) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field model.vocab: '{}' needs an id in [0, {}), got {}", where, piece,
                        kTokenIdLimit, id.dump());
    }
    const auto index = static_cast<size_t>(id.as_int());
    if (pieces.size() <= index) pieces.resize(index + 1);
    pieces[index] = piece;
  }
  return pieces;
}

// A merge is "left right" or ["left", "right"].
Result<BpeModel::Merge> parse_merge(const Json& json) {
  if (json.is_array() && json.as_array().size() == 2 && json.as_array()[0].is_string() &&
      json.as_array()[1].is_string()) {
    return BpeModel::Merge(json.as_array()[0].as_string(), json.as_array()[1].as_string());
  }
  if (json.is_string()) {
    const std::string& text = json.as_string();
    const size_t blank = text.find(' ');
    if (blank != std::string::npos && text.find(' ', blank + 1) == std::string::npos) {
      return BpeModel::Merge(text.substr(0, blank), text.substr(blank + 1));
    }
  }
  return make_error(StatusCode::kCorrupt,
                    "expected \"left right\" or [\"left\", \"right\"], got {}",
                    json.dump().substr(0, 60));
}

Result<std::vector<BpeModel::Merge>> parse_merges(const Json& model, std::string_view where) {
  const Json* list = model.find("merges");
  if (list == nullptr || !list->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: field model.merges: expected an array", where);
  }
  std::vector<BpeModel::Merge> merges;
  merges.reserve(list->as_array().size());
  for (const Json& entry : list->as_array()) {
    Result<BpeModel::Merge> merge = parse_merge(entry);
    if (!merge.ok()) {
      return merge.status().with_context(
          fmt::format("{}: field model.merges[{}]", where, merges.size()));
    }
    merges.push_back(std::move(merge).value());
  }
  return merges;
}

Status parse_model_options(const Json& model, const std::string& where, ModelSection& section) {
  const JsonReader reader(model, where + ": model");
  NIBBLE_ASSIGN_OR_RETURN(section.options.byte_fallback,
                          reader.optional_bool("byte_fallback", false));
  NIBBLE_ASSIGN_OR_RETURN(section.options.fuse_unknown, reader.optional_bool("fuse_unk", false));
  NIBBLE_ASSIGN_OR_RETURN(section.options.whole_word_first,
                          reader.optional_bool("ignore_merges", false));
  for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string value, reader.optional_string(field, ""));
    if (!value.empty()) {
      return make_error(StatusCode::kUnsupported, "{}: field model.{}: '{}' is not supported",
                        where, field, value);
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string unknown, reader.optional_string("unk_token", ""));
  if (!unknown.empty()) {
    for (size_t id = 0; id < section.pieces.size(); ++id) {
      if (section.pieces[id] == unknown) section.options.unknown_id = static_cast<int32_t>(id);
    }
    if (!section.options.unknown_id) {
      return make_error(StatusCode::kCorrupt, "{}: field model.unk_token: '{}' is not in the vocab",
                        where, unknown);
    }
  }
  return {};
}

Result<ModelSection> parse_model_section(const Json& root, const std::string& where) {
  const Json* model = root.find("model");
  if (model == nullptr || !model->is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: field model: expected an object", where);
  }
  const std::string type = type_of(*model);
  if (type != "BPE" && !(type.empty() && model->find("merges") != nullptr)) {
    return make_error(StatusCode::kUnsupported,
                      "{}: field model.type: '{}' is not supported; only BPE is", where, type);
  }
  ModelSection section;
  NIBBLE_ASSIGN_OR_RETURN(section.pieces, parse_vocab(*model, where));
  NIBBLE_ASSIGN_OR_RETURN(section.merges, parse_merges(*model, where));
  NIBBLE_RETURN_IF_ERROR(parse_model_options(*model, where, section));
  return section;
}

// Pieces of GPT-2's alphabet become the bytes that they stand for.
Status build_byte_level(ModelSection section, std::string_view where, TokenizerParts& parts) {
  BpeVocabulary vocabulary;
  for (std::string& piece : section.pieces) {
    std::optional<std::string> bytes = byte_level_decoded(piece);
    vocabulary.pieces.push_back(bytes.value_or(""));
    parts.token_bytes.push_back(bytes ? *std::move(bytes) : std::move(piece));
  }
  for (auto& [left, right] : section.merges) {
    const auto left_bytes = byte_level_decoded(left);
    const auto right_bytes = byte_level_decoded(right);
    if (!left_bytes || !right_bytes) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field model.merges: '{} {}' has characters outside the byte alphabet",
                        where, left, right);
    }
    left = *left_bytes;
    right = *right_bytes;
  }
  section.options.unit = SymbolUnit::kByte;
  NIBBLE_ASSIGN_OR_RETURN(parts.model, BpeModel::from_merges(std::move(vocabulary), section.merges,
                                                             section.options, where));
  return {};
}

Status build_character_level(ModelSection section,
                             const DecoderSteps& decoder,
                             std::string_view where,
                             TokenizerParts& parts) {
  BpeVocabulary vocabulary;
  for (size_t id = 0; id < section.pieces.size(); ++id) {
    const auto byte = byte_piece_value(section.pieces[id]);
    if (byte) vocabulary.byte_id[*byte] = static_cast<int32_t>(id);
    parts.token_bytes.push_back(byte && decoder.byte_fallback
                                    ? std::string(1, static_cast<char>(*byte))
                                    : internal::decoded_piece(decoder, section.pieces[id]));
  }
  vocabulary.pieces = std::move(section.pieces);
  section.options.unit = SymbolUnit::kCodePoint;
  parts.strip_leading_space = decoder.strip_leading_space;
  NIBBLE_ASSIGN_OR_RETURN(parts.model, BpeModel::from_merges(std::move(vocabulary), section.merges,
                                                             section.options, where));
  return {};
}

Status parse_added_list(const Json& root,
                        const std::string& where,
                        VocabularyNames& names,
                        TokenizerParts& parts) {
  const Json* list = member(root, "added_tokens");
  if (list == nullptr) {
    return {};
  }
  if (!list->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: field added_tokens: expected an array", where);
  }
  for (size_t i = 0; i < list->as_array().size(); ++i) {
    const Json& entry = list->as_array()[i];
    const std::string place = fmt::format("{}: added_tokens[{}]", where, i);
    NIBBLE_ASSIGN_OR_RETURN(AddedToken token, parse_added_token(entry, place));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t id, JsonReader(entry, place).required_int("id"));
    if (id < 0 || id >= kTokenIdLimit) {
      return make_error(StatusCode::kCorrupt, "{}: field id: {} is outside [0, {})", place, id,
                        kTokenIdLimit);
    }
    token.id = static_cast<int32_t>(id);
    if (token.normalized && !parts.normalizer.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(token.pattern,
                              parts.normalizer.apply({token.content}, SectionPlace::kTextStart));
    }
    NIBBLE_RETURN_IF_ERROR(list_added_token(token, names, parts).with_context(place));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> tokenizer_from_json(std::string_view tokenizer_json,
                                                       const TokenizerConfig& config,
                                                       std::string_view where) {
  const Result<Json> root = Json::parse(tokenizer_json);
  return root.ok() ? tokenizer_from_parsed(*root, config, where)
                   : root.status().with_context(where);
}

Result<std::unique_ptr<Tokenizer>> tokenizer_from_parsed(const Json& root,
                                                         const TokenizerConfig& config,
                                                         std::string_view where_view) {
  const std::string where(where_view);
  NIBBLE_ASSIGN_OR_RETURN(ModelSection section, parse_model_section(root, where));
  VocabularyNames names(section.pieces);
  TokenizerParts parts;
  bool byte_level = false;
  if (const Json* json = member(root, "normalizer")) {
    NIBBLE_RETURN_IF_ERROR(
        internal::add_normalizer_steps(*json, where + ": normalizer", parts.normalizer));
  }
  if (const Json* json = member(root, "pre_tokenizer")) {
    NIBBLE_ASSIGN_OR_RETURN(byte_level, internal::add_pre_tokenizer_steps(
                                            *json, where + ": pre_tokenizer", parts.pre_tokenizer));
  }
  DecoderSteps decoder;
  if (const Json* json = member(root, "decoder")) {
    NIBBLE_RETURN_IF_ERROR(internal::add_decoder_steps(*json, where + ": decoder", decoder));
  }
  if (byte_level) {
    NIBBLE_RETURN_IF_ERROR(build_byte_level(std::move(section), where, parts));
  } else {
    NIBBLE_RETURN_IF_ERROR(build_character_level(std::move(section), decoder, where, parts));
  }
  NIBBLE_RETURN_IF_ERROR(parse_added_list(root, where, names, parts));
  if (const Json* json = member(root, "post_processor")) {
    NIBBLE_RETURN_IF_ERROR(
        internal::add_prompt_prefix(*json, where + ": post_processor", parts.prompt_prefix));
  }
  NIBBLE_RETURN_IF_ERROR(apply_tokenizer_config(config, names, parts));
  return Tokenizer::create(std::move(parts));
}

}  // namespace nibble
