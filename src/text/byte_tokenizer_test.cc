#include "text/byte_tokenizer.h"

#include <numeric>

#include <gtest/gtest.h>

#include "text/tokenizer.h"
#include "text/tokenizer_loaders.h"

namespace nibble {
namespace {

std::unique_ptr<Tokenizer> load(const ByteTokenizerTokens& tokens) {
  const ByteTokenizerFiles files = make_byte_tokenizer(tokens);
  const TokenizerConfig config =
      TokenizerConfig::parse(files.tokenizer_config.dump(), "tokenizer_config.json").value();
  return tokenizer_from_json(files.tokenizer.dump(), config, "tokenizer.json").value();
}

TEST(ByteTokenizer, EveryByteHasOneToken) {
  const auto tokenizer = load({});
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(tokenizer->token_bytes(byte), std::string(1, static_cast<char>(byte))) << byte;
  }
  const std::string text = "Za\xc5\xbc\xc3\xb3\xc5\x82\xc4\x87, \t\xe6\xb0\xb4 \xf0\x9f\x90\x98\n";
  const auto ids = tokenizer->encode_prompt(text).value();
  EXPECT_EQ(ids.size(), text.size());
  EXPECT_EQ(tokenizer->decode(ids, DecodeSpecials::kKeep), text);
}

TEST(ByteTokenizer, ControlTokensKeepTheirIds) {
  const auto tokenizer = load({.bos = 1, .eos = {2, 300}});
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_TRUE(tokenizer->is_special(300));
  EXPECT_EQ(tokenizer->token_bytes(0), std::string(1, '\0'));
  EXPECT_EQ(tokenizer->token_bytes(3), "\x01");
  EXPECT_EQ(tokenizer->token_bytes(257), "\xff");
  const std::vector<int32_t> expected = {1, 'h' + 2, 'i' + 2};
  EXPECT_EQ(tokenizer->encode_prompt("hi").value(), expected);
  // Ids of a larger vocabulary decode to nothing.
  const std::vector<int32_t> unknown = {'h' + 2, 299, 31999, 'i' + 2, 1, 300};
  EXPECT_EQ(tokenizer->decode(unknown, DecodeSpecials::kSkip), "hi");
}

}  // namespace
}  // namespace nibble
