#include "text/gguf_tokenizer.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <fmt/core.h>

#include "text/pretokenizer.h"

namespace nibble {
namespace {

constexpr std::string_view kModel = "tokenizer.ggml.model";
constexpr std::string_view kPre = "tokenizer.ggml.pre";
constexpr std::string_view kTokens = "tokenizer.ggml.tokens";
constexpr std::string_view kTypes = "tokenizer.ggml.token_type";
constexpr std::string_view kMerges = "tokenizer.ggml.merges";
constexpr std::string_view kScores = "tokenizer.ggml.scores";
constexpr std::string_view kSpace = "\u2581";

// Values of tokenizer.ggml.token_type.
enum TokenType : int64_t { kUnknown = 2, kControl = 3, kUserDefined = 4 };

/// How text is cut before it is merged, by the name that tokenizer.ggml.pre gives it.
struct PreTokenizerRow {
  std::string_view name;
  std::string_view pattern;  // of known_split_pattern(); what tokenizer.json says of "gpt2"
  bool single_digits = false;
  bool unicode_nfc = false;
  bool whole_words = false;  // a word that is a token is not merged anew
  bool begins = false;       // with BOS, where add_bos_token is absent
};

constexpr std::array kPreTokenizers = {
    PreTokenizerRow{.name = "gpt-2", .pattern = "gpt2"},
    PreTokenizerRow{.name = "smollm", .pattern = "gpt2", .single_digits = true},
    PreTokenizerRow{.name = "llama-bpe", .pattern = "llama3", .whole_words = true, .begins = true},
    PreTokenizerRow{.name = "llama3", .pattern = "llama3", .whole_words = true, .begins = true},
    PreTokenizerRow{.name = "llama-v3", .pattern = "llama3", .whole_words = true, .begins = true},
    PreTokenizerRow{.name = "qwen2", .pattern = "qwen2", .unicode_nfc = true},
    PreTokenizerRow{.name = "deepseek-r1-qwen", .pattern = "qwen2", .unicode_nfc = true},
    PreTokenizerRow{.name = "tekken", .pattern = "tekken", .whole_words = true, .begins = true},
    PreTokenizerRow{.name = "gpt-4o", .pattern = "o200k"},
    PreTokenizerRow{.name = "kimi-k2", .pattern = "kimi_k2", .whole_words = true},
};

Json object(std::vector<JsonObject::Member> members) { return Json::object(std::move(members)); }

/// Builds both files from what the metadata says.
class Builder {
 public:
  explicit Builder(const gguf::Metadata& metadata) : metadata_(metadata) {}

  Result<GgufTokenizerFiles> build() {
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view model, metadata_.require_string(kModel));
    NIBBLE_RETURN_IF_ERROR(read_tokens());
    if (model == "gpt2") {
      NIBBLE_RETURN_IF_ERROR(build_byte_level());
    } else if (model == "llama") {
      NIBBLE_RETURN_IF_ERROR(build_sentencepiece());
    } else {
      return metadata_.unsupported(
          kModel, fmt::format("\"{}\" is not known to this build; gpt2 and llama are", model));
    }
    NIBBLE_RETURN_IF_ERROR(build_config());
    files_.tokenizer.set("added_tokens", added_tokens());
    return std::move(files_);
  }

 private:
  Status read_tokens() {
    NIBBLE_ASSIGN_OR_RETURN(tokens_, metadata_.require_strings(kTokens));
    if (tokens_.empty()) {
      return metadata_.corrupt(kTokens, "is empty");
    }
    if (metadata_.find(kTypes) != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(types_, metadata_.require_ints(kTypes));
    }
    if (!types_.empty() && types_.size() != tokens_.size()) {
      return wrong_count(kTypes, types_.size());
    }
    return {};
  }

  [[nodiscard]] Status wrong_count(std::string_view key, size_t count) const {
    return metadata_.corrupt(
        key, fmt::format("has {} entries, but {} has {}", count, kTokens, tokens_.size()));
  }

  [[nodiscard]] JsonArray added_tokens() const {
    JsonArray added;
    for (size_t id = 0; id < types_.size(); ++id) {
      const bool special = types_[id] == kControl || types_[id] == kUnknown;
      if (special || types_[id] == kUserDefined) {
        added.push_back(object({{"id", static_cast<int64_t>(id)},
                                {"content", tokens_[id]},
                                {"single_word", false},
                                {"lstrip", false},
                                {"rstrip", false},
                                {"normalized", false},
                                {"special", special}}));
      }
    }
    return added;
  }

  [[nodiscard]] Json vocabulary() const {
    JsonObject vocab;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      vocab.append(std::string(tokens_[id]), static_cast<int64_t>(id));
    }
    return vocab;
  }

  Result<const PreTokenizerRow*> find_pre_tokenizer() const {
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view name, metadata_.require_string(kPre));
    const auto* const row = std::ranges::find(kPreTokenizers, name, &PreTokenizerRow::name);
    if (row != kPreTokenizers.end()) {
      return row;
    }
    std::string known;
    for (const PreTokenizerRow& each : kPreTokenizers) {
      known += fmt::format("{}{}", known.empty() ? "" : ", ", each.name);
    }
    return metadata_.unsupported(
        kPre, fmt::format("\"{}\" is not known to this build, and text cut otherwise would be "
                          "other tokens; it knows {}. A folder with the model's tokenizer.json "
                          "runs",
                          name, known));
  }

  static Json byte_level(bool use_regex) {
    return object({{"type", "ByteLevel"},
                   {"add_prefix_space", false},
                   {"trim_offsets", true},
                   {"use_regex", use_regex}});
  }

  static Json pre_tokenizer(const PreTokenizerRow& row) {
    JsonArray steps;
    if (row.single_digits) {
      steps.push_back(object({{"type", "Digits"}, {"individual_digits", true}}));
    }
    const bool implied = row.pattern == "gpt2";
    if (!implied) {
      steps.push_back(object({{"type", "Split"},
                              {"pattern", object({{"Regex", known_split_pattern(row.pattern)}})},
                              {"behavior", "Isolated"},
                              {"invert", false}}));
    }
    steps.push_back(byte_level(implied));
    return object({{"type", "Sequence"}, {"pretokenizers", std::move(steps)}});
  }

  Status build_byte_level() {
    NIBBLE_ASSIGN_OR_RETURN(const PreTokenizerRow* row, find_pre_tokenizer());
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string_view> merges,
                            metadata_.require_strings(kMerges));
    JsonArray list;
    list.reserve(merges.size());
    for (const std::string_view merge : merges) {
      list.emplace_back(merge);
    }
    begins_ = row->begins;
    files_.tokenizer =
        object({{"version", "1.0"},
                {"added_tokens", JsonArray()},
                {"normalizer", row->unicode_nfc ? object({{"type", "NFC"}}) : Json()},
                {"pre_tokenizer", pre_tokenizer(*row)},
                {"post_processor", byte_level(false)},
                {"decoder", byte_level(true)},
                {"model", object({{"type", "BPE"},
                                  {"unk_token", Json()},
                                  {"fuse_unk", false},
                                  {"byte_fallback", false},
                                  {"ignore_merges", row->whole_words},
                                  {"vocab", vocabulary()},
                                  {"merges", std::move(list)}})}});
    return {};
  }

  // Pairs of pieces that make a third, the pair of the best third first: in this order
  // SentencePiece merges.
  Result<JsonArray> merges_of_scores() const {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<float> scores, metadata_.require_floats(kScores));
    if (scores.size() != tokens_.size()) {
      return wrong_count(kScores, scores.size());
    }
    std::unordered_map<std::string_view, size_t> ids;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      ids.emplace(tokens_[id], id);
    }
    struct Merge {
      size_t whole, left, right;
    };
    std::vector<Merge> merges;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      const std::string_view token = tokens_[id];
      for (size_t cut = 1; cut < token.size(); ++cut) {
        if ((static_cast<unsigned char>(token[cut]) & 0xc0U) == 0x80U) {
          continue;  // within a character
        }
        const auto left = ids.find(token.substr(0, cut));
        const auto right = ids.find(token.substr(cut));
        if (left != ids.end() && right != ids.end()) {
          merges.push_back({id, left->second, right->second});
        }
      }
    }
    std::ranges::stable_sort(merges, [&](const Merge& a, const Merge& b) {
      return scores[a.whole] != scores[b.whole] ? scores[a.whole] > scores[b.whole]
             : a.left != b.left                 ? a.left < b.left
                                                : a.right < b.right;
    });
    JsonArray list;
    for (const Merge& merge : merges) {
      list.push_back(JsonArray{tokens_[merge.left], tokens_[merge.right]});
    }
    return list;
  }

  Status build_sentencepiece() {
    NIBBLE_ASSIGN_OR_RETURN(JsonArray merges, merges_of_scores());
    NIBBLE_ASSIGN_OR_RETURN(const bool prefix,
                            metadata_.optional_bool("tokenizer.ggml.add_space_prefix", true));
    const auto replace = [](std::string_view from, std::string_view to) {
      return object(
          {{"type", "Replace"}, {"pattern", object({{"String", from}})}, {"content", to}});
    };
    JsonArray normalizers, decoders = {replace(kSpace, " "), object({{"type", "ByteFallback"}}),
                                       object({{"type", "Fuse"}})};
    if (prefix) {
      normalizers.push_back(object({{"type", "Prepend"}, {"prepend", kSpace}}));
      decoders.push_back(object({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}));
    }
    normalizers.push_back(replace(" ", kSpace));
    begins_ = true;
    files_.tokenizer = object(
        {{"version", "1.0"},
         {"added_tokens", JsonArray()},
         {"normalizer", object({{"type", "Sequence"}, {"normalizers", std::move(normalizers)}})},
         {"pre_tokenizer", Json()},
         {"post_processor", Json()},
         {"decoder", object({{"type", "Sequence"}, {"decoders", std::move(decoders)}})},
         {"model", object({{"type", "BPE"},
                           {"unk_token", unknown_token()},
                           {"fuse_unk", true},
                           {"byte_fallback", true},
                           {"ignore_merges", false},
                           {"vocab", vocabulary()},
                           {"merges", std::move(merges)}})}});
    return {};
  }

  [[nodiscard]] Json unknown_token() const {
    const auto found = std::ranges::find(types_, int64_t{kUnknown});
    return found == types_.end() ? Json()
                                 : Json(tokens_[static_cast<size_t>(found - types_.begin())]);
  }

  // The token that a key names; null where the key is absent.
  Result<Json> named_token(std::string_view name) const {
    const std::string key = fmt::format("tokenizer.ggml.{}_token_id", name);
    if (metadata_.find(key) == nullptr) {
      return Json();
    }
    NIBBLE_ASSIGN_OR_RETURN(const uint64_t id, metadata_.require_uint(key));
    if (id >= tokens_.size()) {
      return metadata_.corrupt(key,
                               fmt::format("{} is no token; there are {}", id, tokens_.size()));
    }
    return Json(tokens_[id]);
  }

  // What is put before every prompt.
  Status add_beginning(const Json& bos) {
    NIBBLE_ASSIGN_OR_RETURN(const uint64_t id,
                            metadata_.optional_uint("tokenizer.ggml.bos_token_id", 0));
    if (bos.is_null()) {
      return metadata_.corrupt("tokenizer.ggml.add_bos_token",
                               "asks for a BOS, but tokenizer.ggml.bos_token_id is missing");
    }
    const std::string& name = bos.as_string();
    const auto item = [](std::string_view kind, std::string_view what, int type) {
      return object({{kind.data(), object({{"id", what}, {"type_id", type}})}});
    };
    files_.tokenizer.set(
        "post_processor",
        object({{"type", "TemplateProcessing"},
                {"single", JsonArray{item("SpecialToken", name, 0), item("Sequence", "A", 0)}},
                {"pair", JsonArray{item("SpecialToken", name, 0), item("Sequence", "A", 0),
                                   item("SpecialToken", name, 1), item("Sequence", "B", 1)}},
                {"special_tokens", object({{name, object({{"id", name},
                                                          {"ids", JsonArray{id}},
                                                          {"tokens", JsonArray{name}}})}})}}));
    return {};
  }

  Status build_config() {
    constexpr std::string_view kAddBos = "tokenizer.ggml.add_bos_token";
    constexpr std::string_view kAddEos = "tokenizer.ggml.add_eos_token";
    NIBBLE_ASSIGN_OR_RETURN(const bool ends, metadata_.optional_bool(kAddEos, false));
    if (ends) {
      return metadata_.unsupported(kAddEos, "an EOS behind every prompt is not supported");
    }
    files_.config = object({{"tokenizer_class", "PreTrainedTokenizerFast"}});
    for (const std::string_view name : {"bos", "eos"}) {
      NIBBLE_ASSIGN_OR_RETURN(Json token, named_token(name));
      if (!token.is_null()) {
        files_.config.set(fmt::format("{}_token", name), std::move(token));
      }
    }
    for (const auto& [key, name] : {std::pair("unknown", "unk_token"), {"padding", "pad_token"}}) {
      NIBBLE_ASSIGN_OR_RETURN(Json token, named_token(key));
      if (!token.is_null()) {
        files_.config.set(name, std::move(token));
      }
    }
    NIBBLE_ASSIGN_OR_RETURN(const bool begins, metadata_.optional_bool(kAddBos, begins_));
    files_.config.set("add_bos_token", begins);
    if (begins) {
      const Json* bos = files_.config.find("bos_token");
      NIBBLE_RETURN_IF_ERROR(add_beginning(bos == nullptr ? Json() : *bos));
    }
    files_.config.set("clean_up_tokenization_spaces", false);
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view chat,
                            metadata_.optional_string("tokenizer.chat_template", ""));
    if (!chat.empty()) {
      files_.config.set("chat_template", chat);
    }
    return {};
  }

  const gguf::Metadata& metadata_;
  GgufTokenizerFiles files_;
  std::vector<std::string_view> tokens_;
  std::vector<int64_t> types_;  // empty: all are ordinary
  bool begins_ = false;         // with BOS, unless the file says otherwise
};

}  // namespace

Result<GgufTokenizerFiles> gguf_tokenizer_files(const gguf::Metadata& metadata) {
  return Builder(metadata).build();
}

}  // namespace nibble
