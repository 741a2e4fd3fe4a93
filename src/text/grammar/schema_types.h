#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/json.h"

namespace nibble {

/// Types of JSON values as bits of a set; an integer is a number as well.
using SchemaTypes = uint32_t;
inline constexpr SchemaTypes kNullType = 1;
inline constexpr SchemaTypes kBooleanType = 2;
inline constexpr SchemaTypes kObjectType = 4;
inline constexpr SchemaTypes kArrayType = 8;
inline constexpr SchemaTypes kStringType = 16;
inline constexpr SchemaTypes kIntegerType = 32;
inline constexpr SchemaTypes kFractionType = 64;
inline constexpr SchemaTypes kNumberType = kIntegerType | kFractionType;
inline constexpr SchemaTypes kEveryType = 127;

/// The set of a type's name; 0 for others.
[[nodiscard]] SchemaTypes schema_type(std::string_view name);
/// Of one value.
[[nodiscard]] SchemaTypes type_of(const Json& value);
/// What the member "type" of a schema, a name or a list of names, allows; nothing where it is
/// neither. Without the member, all.
[[nodiscard]] std::optional<SchemaTypes> types_of(const Json& schema);
/// The type whose keywords a schema without "type" has (properties: object); 0 for none, and
/// nothing for several.
[[nodiscard]] std::optional<SchemaTypes> implied_type(const Json& schema);
/// Whether no value can be valid against both schemas, as far as can be told: by their types, by
/// const and enum, or by a member that both require.
[[nodiscard]] bool are_disjoint(const Json& a, const Json& b);
/// About how many values, or pieces of long ones, that compares.
[[nodiscard]] int64_t comparing_steps(const Json& a, const Json& b);

}  // namespace nibble
