#pragma once

#include "base/json.h"
#include "base/status.h"
#include "gguf/metadata.h"

namespace nibble {

/// The files of a Hugging Face folder that say what the metadata of a GGUF file says of text.
struct GgufTokenizerFiles {
  Json tokenizer;  // tokenizer.json
  Json config;     // tokenizer_config.json: special tokens and chat template
};

/// Byte-level BPE (tokenizer.ggml.model "gpt2", cut as tokenizer.ggml.pre says) and SentencePiece
/// BPE with scores ("llama"). Errors name the key: kNotFound (a file without tokenizer), kCorrupt
/// (lists of unequal lengths, ids outside the vocabulary), kUnsupported (another model, a
/// pre-tokenizer that is not known: it is never guessed).
Result<GgufTokenizerFiles> gguf_tokenizer_files(const gguf::Metadata& metadata);

}  // namespace nibble
