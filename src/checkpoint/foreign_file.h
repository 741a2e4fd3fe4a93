#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace nibble {

/// What a file that is not in the safetensors format is, and what to do about it, for error
/// messages: "the config.json of a model; give the folder that it is in". Empty when its first
/// bytes do not tell.
///   name  of the file, without folder
[[nodiscard]] std::string describe_foreign_file(std::span<const std::byte> file,
                                                std::string_view name);

}  // namespace nibble
