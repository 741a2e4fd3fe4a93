#include "server/schema_embedding.h"

#include <algorithm>
#include <array>
#include <limits>

#include "server/schema_routes.h"

namespace nibble {
namespace {

constexpr std::array<std::string_view, 14> kFields = {"model",
                                                      "input",
                                                      "encoding_format",
                                                      "dimensions",
                                                      "user",
                                                      "truncate_prompt_tokens",
                                                      "add_special_tokens",
                                                      "priority",
                                                      "cache_salt",
                                                      "normalize",
                                                      "use_activation",
                                                      "request_id",
                                                      "embed_dtype",
                                                      "endianness"};
constexpr std::array kIgnored = {
    IgnoredRow{"user"},
    IgnoredRow{"request_id"},
};

void read_encoding(FieldReader& fields, EmbeddingEncoding& encoding) {
  std::string name = "float";
  fields.text("encoding_format", name);
  if (name != "float" && name != "base64") {
    fields.fail("encoding_format", "encoding_format: expected \"float\" or \"base64\"");
  }
  encoding = name == "base64" ? EmbeddingEncoding::kBase64 : EmbeddingEncoding::kFloat;
  std::string type = "float32";
  fields.text("embed_dtype", type);
  if (type != "float32") {
    fields.fail("embed_dtype", "embed_dtype: only \"float32\" is sent");
  }
  std::string order = "little";
  fields.text("endianness", order);
  if (order != "little" && order != "native") {
    fields.fail("endianness", "endianness: only \"little\" is sent");
  }
}

}  // namespace

std::variant<EmbeddingRequest, ApiError> parse_embedding_request(std::string_view body,
                                                                 Strictness strictness) {
  const auto object = parse_object(body);
  if (const auto* error = std::get_if<ApiError>(&object)) {
    return *error;
  }
  const Json& json = std::get<Json>(object);
  FieldReader fields(json);
  EmbeddingRequest request;
  const auto known = [](std::string_view key) {
    return std::ranges::find(kFields, key) != kFields.end();
  };
  request.ignored.unknown = check_unknown_fields(fields, json, known, strictness);
  read_ignored(fields, kIgnored, strictness, request.ignored);
  fields.text("model", request.model);
  read_prompts(fields, "input", request.inputs);
  read_encoding(fields, request.encoding);
  if (fields.find("dimensions") != nullptr) {
    fields.integer("dimensions", 1, std::numeric_limits<int32_t>::max(),
                   request.dimensions.emplace());
  }
  bool normalize = true;
  fields.boolean("use_activation", normalize);  // the newer name
  fields.boolean("normalize", normalize);
  request.length = normalize ? VectorLength::kOne : VectorLength::kAsComputed;
  fields.boolean("add_special_tokens", request.add_special_tokens);
  read_truncation(fields, request.truncate_prompt_tokens);
  read_scheduling(fields, request.cache_salt, request.priority);
  if (fields.error()) {
    return *fields.error();
  }
  return request;
}

}  // namespace nibble
