#pragma once

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

#include "text/tokenizer_loaders.h"

namespace nibble::test {

inline std::string read_plain(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// Contents of `path`, or of `path`.xz unpacked by the xz tool; "" if neither is there.
inline std::string read_maybe_packed(const std::string& path) {
  if (std::filesystem::exists(path)) {
    return read_plain(path);
  }
  if (!std::filesystem::exists(path + ".xz")) {
    return {};
  }
  std::string content;
  FILE* pipe = popen(("xz -dc '" + path + ".xz'").c_str(), "r");
  if (pipe == nullptr) {
    return {};
  }
  char buffer[65536];
  for (size_t n = 0; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) content.append(buffer, n);
  pclose(pipe);
  return content;
}

inline std::unique_ptr<Tokenizer> must(Result<std::unique_ptr<Tokenizer>> result) {
  return result.ok() ? std::move(result).value()
                     : throw std::runtime_error(result.status().message());
}

/// One special token, as in specials_and_patterns.json.
inline AddedToken special_token(int32_t id, std::string content) {
  return {.id = id, .content = std::move(content), .special = true};
}

inline std::unique_ptr<Tokenizer> gpt2() {
  static const std::string kVocab = read_maybe_packed("tests/data/tokenizers/gpt2_vocab.json");
  static const std::string kMerges = read_maybe_packed("tests/data/tokenizers/gpt2_merges.txt");
  TokenizerConfig config;
  config.added_tokens = {special_token(50256, "<|endoftext|>")};
  config.bos_token = config.eos_token = "<|endoftext|>";
  return must(tokenizer_from_vocab(
      {.vocab_json = kVocab, .merges_txt = kMerges, .pattern = known_split_pattern("gpt2")},
      config));
}

inline std::unique_ptr<Tokenizer> qwen2() {
  static const std::string kVocab = read_maybe_packed("tests/data/tokenizers/qwen2_vocab.json");
  static const std::string kMerges = read_maybe_packed("tests/data/tokenizers/qwen2_merges.txt");
  TokenizerConfig config;
  config.added_tokens = {special_token(151643, "<|endoftext|>"),
                         special_token(151644, "<|im_start|>"),
                         special_token(151645, "<|im_end|>")};
  config.eos_token = "<|im_end|>";
  return must(tokenizer_from_vocab({.vocab_json = kVocab,
                                    .merges_txt = kMerges,
                                    .pattern = known_split_pattern("qwen2"),
                                    .unicode_nfc = true},
                                   config));
}

}  // namespace nibble::test
