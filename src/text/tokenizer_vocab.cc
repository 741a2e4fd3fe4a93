#include "text/tokenizer_loaders.h"

namespace nibble {
namespace {

// Lines "left right" of merges.txt, in the form of tokenizer.json.
JsonArray merge_list(std::string_view text) {
  JsonArray merges;
  bool first = true;
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    std::string_view line = text.substr(0, newline);
    text.remove_prefix(newline == std::string_view::npos ? text.size() : newline + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    const bool header = first && line.starts_with("#version");
    first = false;
    if (!line.empty() && !header) merges.emplace_back(line);
  }
  return merges;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> tokenizer_from_vocab(const VocabAndMerges& files,
                                                        const TokenizerConfig& config) {
  Result<Json> vocab = Json::parse(files.vocab_json);
  if (!vocab.ok()) {
    return vocab.status().with_context("vocab.json");
  }
  // The same tokenizer as a tokenizer.json document.
  const Json model = Json::object({{"type", "BPE"},
                                   {"vocab", std::move(vocab).value()},
                                   {"merges", merge_list(files.merges_txt)}});
  const Json split = Json::object({{"type", "Split"},
                                   {"pattern", Json::object({{"Regex", files.pattern}})},
                                   {"behavior", "Isolated"}});
  const Json byte_level =
      Json::object({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  const Json document = Json::object(
      {{"normalizer", files.unicode_nfc ? Json::object({{"type", "NFC"}}) : Json()},
       {"pre_tokenizer",
        Json::object({{"type", "Sequence"}, {"pretokenizers", JsonArray{split, byte_level}}})},
       {"decoder", Json::object({{"type", "ByteLevel"}})},
       {"model", model}});
  return tokenizer_from_json(document.dump(), config, "vocab.json and merges.txt");
}

}  // namespace nibble
