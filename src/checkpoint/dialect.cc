#include "checkpoint/dialect.h"

#include <array>
#include <utility>

namespace nibble {
namespace {

constexpr std::array<std::pair<std::string_view, Dialect>, 3> kNames = {{
    {"compressed-tensors", Dialect::kCompressedTensors},
    {"quark", Dialect::kQuark},
    {"fp8", Dialect::kFp8Block},
}};

bool can_store(Dialect dialect, const QuantScheme& scheme) {
  const WeightFormat& weight = scheme.weight;
  if (!weight.quantized()) {
    return true;
  }
  switch (dialect) {
    case Dialect::kCompressedTensors:
      return true;
    case Dialect::kQuark:
      return weight.code == WeightCode::kInt4 && weight.scale_per == ScalePer::kChannel &&
             scheme.act == ActFormat::kInt8Token;
    case Dialect::kFp8Block:
      return weight.code == WeightCode::kFp8E4M3 && weight.scale_per == ScalePer::kBlock;
  }
  return false;
}

}  // namespace

Result<Dialect> parse_dialect(std::string_view name) {
  std::string known;
  for (const auto& [text, dialect] : kNames) {
    if (text == name) {
      return dialect;
    }
    known += known.empty() ? "" : ", ";
    known += text;
  }
  return make_error(StatusCode::kInvalidArgument, "unknown format \"{}\"; choose one of {}", name,
                    known);
}

std::string_view dialect_name(Dialect dialect) {
  for (const auto& [text, value] : kNames) {
    if (value == dialect) {
      return text;
    }
  }
  return {};
}

Dialect default_dialect(const QuantScheme& scheme) {
  if (scheme.weight.quantized()) {
    for (const Dialect special : {Dialect::kQuark, Dialect::kFp8Block}) {
      if (can_store(special, scheme)) {
        return special;
      }
    }
  }
  return Dialect::kCompressedTensors;
}

Status check_dialect(Dialect dialect, const QuantScheme& scheme) {
  if (can_store(dialect, scheme)) {
    return {};
  }
  std::string able;
  for (const auto& [text, other] : kNames) {
    if (can_store(other, scheme)) {
      able += able.empty() ? "" : ", ";
      able += text;
    }
  }
  return make_error(StatusCode::kUnsupported,
                    "format {} cannot store scheme {}; choose another with --format: {}",
                    dialect_name(dialect), scheme.name, able);
}

}  // namespace nibble
