#include <cstddef>
#include <cstdint>
#include <string_view>

#include "text/tokenizer_loaders.h"

// The input is a tokenizer.json; a document that loads also encodes and decodes a little.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (size > (size_t{1} << 16)) {
    return 0;
  }
  auto tokenizer = nibble::tokenizer_from_json(text, nibble::TokenizerConfig{});
  if (tokenizer.ok()) {
    const std::string_view sample = "Hello, \xE4\xB8\x96\xE7\x95\x8C 123 \xF0\x9F\x98\x80\n\xFF ab";
    if (const auto ids = (*tokenizer)->encode(sample, nibble::SpecialTokens::kParse); ids.ok()) {
      (void)(*tokenizer)->decode(*ids, nibble::DecodeSpecials::kSkip);
    }
    if (const auto own = (*tokenizer)->encode_prompt(text.substr(0, 256)); own.ok()) {
      (void)(*tokenizer)->decode(*own, nibble::DecodeSpecials::kKeep);
    }
  }
  // The same bytes as the other formats.
  (void)nibble::tokenizer_from_sentencepiece(text, nibble::TokenizerConfig{});
  (void)nibble::TokenizerConfig::parse(text, "tokenizer_config.json");
  return 0;
}
