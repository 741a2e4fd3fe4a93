#include "arch/dtype_field.h"

#include <array>
#include <string_view>

namespace nibble {
namespace {

struct NamedType {
  std::string_view name;
  DType type;
};

// Names that PyTorch has for the three types.
constexpr std::array<NamedType, 5> kTypes = {{{"bfloat16", DType::kBF16},
                                              {"float16", DType::kF16},
                                              {"half", DType::kF16},
                                              {"float32", DType::kF32},
                                              {"float", DType::kF32}}};

Result<std::optional<DType>> read_field(const Json& config,
                                        const JsonReader& reader,
                                        std::string_view key) {
  const Json* field = config.find(key);
  if (field == nullptr || field->is_null()) {
    return std::optional<DType>();
  }
  if (field->is_string()) {
    constexpr std::string_view kPrefix = "torch.";  // as Python prints it
    const std::string_view text = field->as_string();
    const std::string_view name = text.starts_with(kPrefix) ? text.substr(kPrefix.size()) : text;
    for (const NamedType& known : kTypes) {
      if (name == known.name) {
        return std::optional(known.type);
      }
    }
  }
  return make_error(field->is_string() ? StatusCode::kUnsupported : StatusCode::kCorrupt,
                    "{}: field {}: {} is no type that a model computes in; known are \"bfloat16\", "
                    "\"float16\" and \"float32\", the default",
                    reader.where(), key, field->dump());
}

}  // namespace

Result<std::optional<DType>> read_dtype_field(const Json& config, const JsonReader& reader) {
  NIBBLE_ASSIGN_OR_RETURN(const auto older, read_field(config, reader, "torch_dtype"));
  NIBBLE_ASSIGN_OR_RETURN(const auto newer, read_field(config, reader, "dtype"));
  return newer ? newer : older;
}

}  // namespace nibble
