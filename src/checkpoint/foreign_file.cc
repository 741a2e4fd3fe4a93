#include "checkpoint/foreign_file.h"

#include <algorithm>
#include <array>

#include <fmt/core.h>

namespace nibble {
namespace {

constexpr size_t kLookedAt = 512;

struct Magic {
  std::string_view bytes;
  std::string_view meaning;
};

constexpr std::string_view kPickle =
    "a checkpoint of PyTorch's pickle format (.bin, .pt, .pth), which is not read; download the "
    "model's safetensors files or convert it to them";
constexpr std::array<Magic, 8> kMagics = {{
    {"GGUF", "a GGUF file; give its own path, or rename it to end in .gguf"},
    {"PK\x03\x04", kPickle},  // a zip archive around the pickle
    {"\x80\x02", kPickle},
    {"\x80\x03", kPickle},
    {"\x80\x04", kPickle},
    {"\x89HDF", "an HDF5 file, which is not read; download the model's safetensors files"},
    {"\x1f\x8b", "compressed by gzip; unpack it"},
    {"version https://git-lfs",
     "a pointer of Git LFS in place of the file; get the file itself with git lfs pull"},
}};

// Bytes of a character that begins with `lead`; 0 when none does, or for control characters.
size_t character_bytes(unsigned char lead) {
  constexpr unsigned char kDelete = 0x7f;
  if (lead < 0x80) {
    const bool blank = lead == '\t' || lead == '\n' || lead == '\r';
    return blank || (lead >= ' ' && lead != kDelete) ? 1 : 0;
  }
  return lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
}

// UTF-8 without control characters, apart from a character that the end cuts.
bool is_text(std::string_view bytes) {
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) == 0x80; };
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = character_bytes(static_cast<unsigned char>(bytes[at]));
    const std::string_view rest = bytes.substr(at + 1, size == 0 ? 0 : size - 1);
    if (size == 0 || !std::ranges::all_of(rest, continues)) {
      return false;
    }
    at += size;
  }
  return !bytes.empty();
}

std::string describe_json(std::string_view name) {
  constexpr std::string_view kRemedy = "give the folder that it is in";
  if (name == "config.json") {
    return fmt::format("the config.json of a model; {}", kRemedy);
  }
  if (name.ends_with(".index.json")) {
    return fmt::format("the index of a model in several files; {}", kRemedy);
  }
  if (name.starts_with("tokenizer")) {
    return fmt::format("a part of a model's tokenizer; {}", kRemedy);
  }
  return fmt::format("a JSON file; {}, if it belongs to a model", kRemedy);
}

}  // namespace

std::string describe_foreign_file(std::span<const std::byte> file, std::string_view name) {
  const std::string_view begin(reinterpret_cast<const char*>(file.data()),
                               std::min(file.size(), kLookedAt));
  for (const Magic& magic : kMagics) {
    if (begin.starts_with(magic.bytes)) {
      return std::string(magic.meaning);
    }
  }
  if (!is_text(begin)) {
    return {};
  }
  const size_t first = begin.find_first_not_of(" \t\r\n");
  const char sign = first == std::string_view::npos ? ' ' : begin[first];
  if (sign == '{' || sign == '[') {
    return describe_json(name);
  }
  return sign == '<' ? "a web page or an error message in its place; download the file again"
                     : "a text file; give a model's folder or its .safetensors file";
}

}  // namespace nibble
