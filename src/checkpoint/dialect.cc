#include "checkpoint/dialect.h"

#include <algorithm>
#include <string>

#include "checkpoint/dialects/dialects.h"

namespace nibble {
namespace {

const DialectRow* row_of(Dialect dialect) {
  const auto rows = all_dialects();
  const auto found =
      std::ranges::find_if(rows, [&](const DialectRow* row) { return row->dialect == dialect; });
  return found == rows.end() ? nullptr : *found;
}

bool can_store(const DialectRow& row, const QuantScheme& scheme) {
  return row.write != nullptr && (!scheme.weight.quantized() || row.stores(scheme));
}

}  // namespace

Result<Dialect> parse_dialect(std::string_view name) {
  std::string known;
  for (const DialectRow* row : all_dialects()) {
    if (row->write == nullptr) {
      continue;
    }
    if (row->name == name) {
      return row->dialect;
    }
    known += known.empty() ? "" : ", ";
    known += row->name;
  }
  return make_error(StatusCode::kInvalidArgument, "unknown format \"{}\"; choose one of {}", name,
                    known);
}

std::string_view dialect_name(Dialect dialect) {
  const DialectRow* row = row_of(dialect);
  return row == nullptr ? std::string_view() : row->name;
}

Dialect default_dialect(const QuantScheme& scheme) {
  if (scheme.weight.quantized()) {
    // A dialect that knows few schemes was made for them.
    for (const DialectRow* row : all_dialects()) {
      if (row->dialect != Dialect::kCompressedTensors && can_store(*row, scheme)) {
        return row->dialect;
      }
    }
  }
  return Dialect::kCompressedTensors;
}

Status check_dialect(Dialect dialect, const QuantScheme& scheme) {
  const DialectRow* row = row_of(dialect);
  if (row != nullptr && can_store(*row, scheme)) {
    return {};
  }
  std::string able;
  for (const DialectRow* other : all_dialects()) {
    if (can_store(*other, scheme)) {
      able += able.empty() ? "" : ", ";
      able += other->name;
    }
  }
  return make_error(StatusCode::kUnsupported,
                    "format {} cannot store scheme {}; choose another with --format: {}",
                    dialect_name(dialect), scheme.name, able);
}

}  // namespace nibble
