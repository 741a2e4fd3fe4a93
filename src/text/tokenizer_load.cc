#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "gguf/split.h"
#include "text/gguf_tokenizer.h"
#include "text/tokenizer_loaders.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

// Which published tokenizer a rank file belongs to, by its number of ranks: the files themselves do
// not carry their pattern.
std::string_view pattern_name_of(size_t ranks, std::string_view file_name) {
  switch (ranks) {
    case 100256:
      return "cl100k";
    case 128000:
      return "llama3";
    case 163584:
      return "kimi_k2";
    case 199998:
      return "o200k";
    case 151643:
      return "qwen2";
    default:
      break;
  }
  if (file_name == "tiktoken.model") return "kimi_k2";
  if (file_name.starts_with("o200k")) return "o200k";
  if (file_name.starts_with("cl100k")) return "cl100k";
  return file_name == "tokenizer.model" ? "llama3" : "";
}

Result<std::unique_ptr<Tokenizer>> load_tiktoken(const fs::path& path,
                                                 std::string_view content,
                                                 const TokenizerConfig& config) {
  const auto lines = static_cast<size_t>(std::count(content.begin(), content.end(), '\n')) +
                     (content.empty() || content.ends_with('\n') ? 0 : 1);
  const std::string_view name = pattern_name_of(lines, path.filename().string());
  if (name.empty()) {
    return make_error(StatusCode::kUnsupported,
                      "{}: {} ranks belong to no known tokenizer, so its splitting pattern is "
                      "unknown; provide the model's tokenizer.json instead",
                      path.string(), lines);
  }
  return tokenizer_from_tiktoken(content, known_split_pattern(name), config, path.string());
}

Result<std::unique_ptr<Tokenizer>> load_vocab(const fs::path& dir, const TokenizerConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string vocab, read_file(dir / "vocab.json"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string merges, read_file(dir / "merges.txt"));
  const bool is_qwen = config.tokenizer_class.starts_with("Qwen2");
  const VocabAndMerges files{.vocab_json = vocab,
                             .merges_txt = merges,
                             .pattern = known_split_pattern(is_qwen ? "qwen2" : "gpt2"),
                             .unicode_nfc = is_qwen};
  Result<std::unique_ptr<Tokenizer>> tokenizer = tokenizer_from_vocab(files, config);
  return tokenizer.ok()
             ? std::move(tokenizer)
             : Result<std::unique_ptr<Tokenizer>>(tokenizer.status().with_context(dir.string()));
}

Result<std::unique_ptr<Tokenizer>> load_gguf(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const gguf::FileSet model, gguf::FileSet::open(path));
  const gguf::Metadata& metadata = model.metadata();
  NIBBLE_ASSIGN_OR_RETURN(const GgufTokenizerFiles files, gguf_tokenizer_files(metadata));
  NIBBLE_ASSIGN_OR_RETURN(const TokenizerConfig config,
                          TokenizerConfig::parse(files.config.dump(), metadata.where()));
  return tokenizer_from_parsed(files.tokenizer, config, metadata.where());
}

// The file of a directory that ends in .tiktoken: the first by name.
fs::path find_tiktoken(const fs::path& dir) {
  fs::path found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (entry.path().extension() == ".tiktoken" && (found.empty() || entry.path() < found)) {
      found = entry.path();
    }
  }
  return found;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& model_dir) {
  if (gguf::is_gguf_path(model_dir)) {
    return load_gguf(model_dir);
  }
  const fs::path dir(model_dir);
  std::error_code ignored;
  if (!fs::is_directory(dir, ignored)) {
    return make_error(StatusCode::kNotFound,
                      "{} is no folder; give the folder that has the model's tokenizer", model_dir);
  }
  TokenizerConfig config;
  if (const fs::path path = dir / "tokenizer_config.json"; file_exists(path)) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
    NIBBLE_ASSIGN_OR_RETURN(config, TokenizerConfig::parse(text, path.string()));
  }
  if (const fs::path path = dir / "tokenizer.json"; file_exists(path)) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
    return tokenizer_from_json(text, config, path.string());
  }
  if (const fs::path path = dir / "tokenizer.model"; file_exists(path)) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string bytes, read_file(path));
    // A SentencePiece model begins with the tag of its first piece; Llama 3 has ranks here.
    return bytes.starts_with('\n') ? tokenizer_from_sentencepiece(bytes, config, path.string())
                                   : load_tiktoken(path, bytes, config);
  }
  fs::path ranks = dir / "tiktoken.model";
  if (!file_exists(ranks)) ranks = find_tiktoken(dir);
  if (!ranks.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(ranks));
    return load_tiktoken(ranks, text, config);
  }
  if (file_exists(dir / "vocab.json") && file_exists(dir / "merges.txt")) {
    return load_vocab(dir, config);
  }
  return make_error(StatusCode::kNotFound,
                    "{}: no tokenizer (looked for tokenizer.json, tokenizer.model, tiktoken.model, "
                    "*.tiktoken, and vocab.json with merges.txt)",
                    model_dir);
}

}  // namespace nibble
