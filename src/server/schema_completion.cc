#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/schema_routes.h"

namespace nibble {
namespace {

bool is_id_array(const Json& value) {
  return value.is_array() && !value.as_array().empty() && value.as_array().front().is_number();
}

}  // namespace

void read_prompts(FieldReader& fields, std::string_view key, std::vector<PromptInput>& prompts) {
  const Json* given = fields.find(key);
  const std::string expected = fmt::format(
      "{}: expected a string, an array of strings, an array of token ids, or an array of such "
      "arrays, not empty",
      key);
  const auto read_one = [&](const Json& value) {
    if (value.is_string()) {
      prompts.emplace_back(value.as_string());
      return;
    }
    std::vector<int32_t> ids;
    const Json holder = Json::object({{std::string(key), value}});
    FieldReader inner(holder);
    inner.token_ids(key, ids);
    if (inner.error() || ids.empty()) {
      fields.fail(key, inner.error() ? inner.error()->message : expected);
    } else {
      prompts.emplace_back(std::move(ids));
    }
  };
  if (given != nullptr && (given->is_string() || is_id_array(*given))) {
    read_one(*given);
  } else if (given != nullptr && given->is_array() && !given->as_array().empty()) {
    for (const Json& value : given->as_array()) {
      read_one(value);
    }
  } else {
    fields.fail(key, expected);
  }
}

void read_completion_fields(FieldReader& fields, GenerationRequest& request) {
  read_prompts(fields, "prompt", request.prompts);
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
