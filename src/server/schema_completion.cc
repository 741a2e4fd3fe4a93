#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/schema_routes.h"

namespace nibble {
namespace {

bool is_id_array(const Json& value) {
  return value.is_array() && !value.as_array().empty() && value.as_array().front().is_number();
}

void read_prompt(FieldReader& fields, GenerationRequest& request) {
  const Json* prompt = fields.find("prompt");
  constexpr const char* kExpected =
      "prompt: expected a string, an array of strings, an array of token ids, or an array of such "
      "arrays, not empty";
  const auto read_one = [&](const Json& value) {
    if (value.is_string()) {
      request.prompts.emplace_back(value.as_string());
      return;
    }
    std::vector<int32_t> ids;
    const Json holder = Json::object({{"prompt", value}});
    FieldReader inner(holder);
    inner.token_ids("prompt", ids);
    if (inner.error() || ids.empty()) {
      fields.fail("prompt", inner.error() ? inner.error()->message : kExpected);
    } else {
      request.prompts.emplace_back(std::move(ids));
    }
  };
  if (prompt != nullptr && (prompt->is_string() || is_id_array(*prompt))) {
    read_one(*prompt);
  } else if (prompt != nullptr && prompt->is_array() && !prompt->as_array().empty()) {
    for (const Json& value : prompt->as_array()) {
      read_one(value);
    }
  } else {
    fields.fail("prompt", kExpected);
  }
}

}  // namespace

void read_completion_fields(FieldReader& fields, GenerationRequest& request) {
  read_prompt(fields, request);
  fields.boolean("echo", request.echo);
  fields.boolean("add_special_tokens", request.add_special_tokens);
  fields.refuse("suffix", "text is only continued at its end");
  if (fields.find("logprobs") != nullptr) {
    int64_t count = 0;
    fields.integer("logprobs", 0, kMaxLogprobs, count);
    request.logprobs = static_cast<int>(count);
  }
}

}  // namespace nibble
