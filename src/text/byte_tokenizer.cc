#include "text/byte_tokenizer.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace nibble {

namespace {

constexpr std::string_view kBosToken = "<|bos|>";
constexpr std::string_view kChatTemplate =
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}";

/// The character that stands for a byte in byte-level vocabularies: itself where it is printable,
/// else one counted from U+0100 (the scheme of GPT-2's encoder).
std::string byte_character(int byte) {
  const auto printable = [](int b) {
    return (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);  // 0xad: soft hyphen
  };
  int code = byte;
  if (!printable(byte)) {
    code = 0x100;
    for (int b = 0; b < byte; ++b) {
      code += printable(b) ? 0 : 1;
    }
  }
  if (code < 0x80) {
    return {static_cast<char>(code)};
  }
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

std::string eos_name(size_t index) {
  return index == 0 ? "<|eos|>" : "<|eos_" + std::to_string(index) + "|>";
}

Json added_token(int32_t id, std::string_view content) {
  return Json::object({{"id", int64_t{id}},
                       {"content", content},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", true}});
}

Json bytes_vocabulary(const ByteTokenizerTokens& tokens) {
  JsonObject vocabulary;
  int64_t id = 0;
  for (int byte = 0; byte < 256; ++byte, ++id) {
    while (tokens.bos == id || std::ranges::find(tokens.eos, id) != tokens.eos.end()) {
      ++id;
    }
    vocabulary.append(byte_character(byte), id);
  }
  return Json(std::move(vocabulary));
}

/// Puts the BOS token before a text.
Json bos_post_processor(int32_t bos) {
  const auto special = [](std::string_view id) {
    return Json::object({{"SpecialToken", Json::object({{"id", id}, {"type_id", 0}})}});
  };
  const auto text = [](const char* id) {
    return Json::object({{"Sequence", Json::object({{"id", id}, {"type_id", 0}})}});
  };
  JsonObject tokens;
  tokens.append(std::string(kBosToken), Json::object({{"id", kBosToken},
                                                      {"ids", JsonArray{int64_t{bos}}},
                                                      {"tokens", JsonArray{kBosToken}}}));
  return Json::object({{"type", "TemplateProcessing"},
                       {"single", JsonArray{special(kBosToken), text("A")}},
                       {"pair", JsonArray{special(kBosToken), text("A"), text("B")}},
                       {"special_tokens", std::move(tokens)}});
}

}  // namespace

ByteTokenizerFiles make_byte_tokenizer(const ByteTokenizerTokens& tokens) {
  JsonArray added;
  Json config = Json::object({{"tokenizer_class", "PreTrainedTokenizerFast"}});
  if (tokens.bos) {
    added.push_back(added_token(*tokens.bos, kBosToken));
    config.set("bos_token", kBosToken);
  }
  for (size_t i = 0; i < tokens.eos.size(); ++i) {
    added.push_back(added_token(tokens.eos[i], eos_name(i)));
  }
  if (!tokens.eos.empty()) {
    config.set("eos_token", eos_name(0));
  }
  config.set("chat_template", kChatTemplate);
  const Json byte_level = Json::object({{"type", "ByteLevel"},
                                        {"add_prefix_space", false},
                                        {"trim_offsets", true},
                                        {"use_regex", false}});
  Json tokenizer =
      Json::object({{"version", "1.0"},
                    {"truncation", nullptr},
                    {"padding", nullptr},
                    {"added_tokens", std::move(added)},
                    {"normalizer", nullptr},
                    {"pre_tokenizer", byte_level},
                    {"post_processor", tokens.bos ? bos_post_processor(*tokens.bos) : Json()},
                    {"decoder", byte_level},
                    {"model", Json::object({{"type", "BPE"},
                                            {"dropout", nullptr},
                                            {"unk_token", nullptr},
                                            {"continuing_subword_prefix", nullptr},
                                            {"end_of_word_suffix", nullptr},
                                            {"fuse_unk", false},
                                            {"byte_fallback", false},
                                            {"ignore_merges", false},
                                            {"vocab", bytes_vocabulary(tokens)},
                                            {"merges", JsonArray{}}})}});
  return {.tokenizer = std::move(tokenizer), .tokenizer_config = std::move(config)};
}

}  // namespace nibble
