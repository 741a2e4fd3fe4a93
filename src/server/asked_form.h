#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"

namespace nibble {

class FieldReader;

/// The form that a request asks its answer to have.
struct AskedForm {
  enum class Kind : uint8_t { kFree, kJsonObject, kJsonSchema, kRegex, kChoice, kEbnf };

  Kind kind = Kind::kFree;
  Json schema;                       // of kJsonSchema
  std::string text;                  // of kRegex and kEbnf
  std::vector<std::string> choices;  // of kChoice
  std::string param;                 // the field that asks
};

/// Which calls of tools a request asks for.
struct AskedCalls {
  bool required = false;
  std::string function;  // that has to be called; "": any
};

/// Reads response_format, vLLM's structured_outputs and guided_*, SGLang's regex, ebnf and
/// json_schema: at most one of them may ask for a form.
[[nodiscard]] AskedForm read_asked_form(FieldReader& fields);

}  // namespace nibble
