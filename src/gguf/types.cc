#include "gguf/types.h"

#include <algorithm>
#include <array>

namespace nibble::gguf {
namespace {

// Block sizes of ggml-common.h.
constexpr std::array kTypes = {
    TypeTraits{Type::kF32, "F32", 1, 4, true}, TypeTraits{Type::kF16, "F16", 1, 2, true},
    TypeTraits{Type::kQ4_0, "Q4_0", 32, 18},   TypeTraits{Type::kQ4_1, "Q4_1", 32, 20},
    TypeTraits{Type::kQ5_0, "Q5_0", 32, 22},   TypeTraits{Type::kQ5_1, "Q5_1", 32, 24},
    TypeTraits{Type::kQ8_0, "Q8_0", 32, 34},   TypeTraits{Type::kQ2_K, "Q2_K", 256, 84},
    TypeTraits{Type::kQ3_K, "Q3_K", 256, 110}, TypeTraits{Type::kQ4_K, "Q4_K", 256, 144},
    TypeTraits{Type::kQ5_K, "Q5_K", 256, 176}, TypeTraits{Type::kQ6_K, "Q6_K", 256, 210},
    TypeTraits{Type::kI8, "I8", 1, 1, true},   TypeTraits{Type::kI16, "I16", 1, 2, true},
    TypeTraits{Type::kI32, "I32", 1, 4, true}, TypeTraits{Type::kI64, "I64", 1, 8, true},
    TypeTraits{Type::kF64, "F64", 1, 8, true}, TypeTraits{Type::kBF16, "BF16", 1, 2, true},
    TypeTraits{Type::kMXFP4, "MXFP4", 32, 17},
};

struct OtherType {
  uint32_t number;
  std::string_view name;
};

// Types of ggml.h that are not read; some only ever existed in memory or were taken out of ggml.
constexpr std::array kOtherTypes = {
    OtherType{4, "Q4_2"},        OtherType{5, "Q4_3"},        OtherType{9, "Q8_1"},
    OtherType{15, "Q8_K"},       OtherType{16, "IQ2_XXS"},    OtherType{17, "IQ2_XS"},
    OtherType{18, "IQ3_XXS"},    OtherType{19, "IQ1_S"},      OtherType{20, "IQ4_NL"},
    OtherType{21, "IQ3_S"},      OtherType{22, "IQ2_S"},      OtherType{23, "IQ4_XS"},
    OtherType{29, "IQ1_M"},      OtherType{31, "Q4_0_4_4"},   OtherType{32, "Q4_0_4_8"},
    OtherType{33, "Q4_0_8_8"},   OtherType{34, "TQ1_0"},      OtherType{35, "TQ2_0"},
    OtherType{36, "IQ4_NL_4_4"}, OtherType{37, "IQ4_NL_4_8"}, OtherType{38, "IQ4_NL_8_8"},
    OtherType{40, "NVFP4"},      OtherType{41, "Q1_0"},
};

}  // namespace

const TypeTraits& type_traits(Type type) {
  const auto* found = std::ranges::find(kTypes, type, &TypeTraits::type);
  CHECK_MSG(found != kTypes.end(), "type {}", static_cast<uint32_t>(type));
  return *found;
}

Result<Type> type_from_number(uint32_t number) {
  const auto type = static_cast<Type>(number);
  if (std::ranges::find(kTypes, type, &TypeTraits::type) != kTypes.end()) {
    return type;
  }
  const auto* other = std::ranges::find(kOtherTypes, number, &OtherType::number);
  if (other != kOtherTypes.end()) {
    return make_error(StatusCode::kUnsupported,
                      "type {} is not supported; use a file of the same model in Q8_0, Q6_K, Q5_K, "
                      "Q4_K or Q4_0",
                      other->name);
  }
  return make_error(StatusCode::kCorrupt,
                    "type number {} is unknown: the file is damaged, or newer than this program; "
                    "download it again, or use a file of the same model in Q8_0 or Q4_K",
                    number);
}

}  // namespace nibble::gguf
