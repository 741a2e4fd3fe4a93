#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/chat_body.h"
#include "server/schema_routes.h"

namespace nibble {
namespace {

constexpr int64_t kDefaultMaxTokens = 128;  // SGLang's

struct FieldName {
  std::string_view theirs, ours;
};

// Members of sampling_params, and of completions.
constexpr std::array kSampling = {
    FieldName{"max_new_tokens", "max_tokens"},
    FieldName{"min_new_tokens", "min_tokens"},
    FieldName{"sampling_seed", "seed"},
    FieldName{"no_stop_trim", "include_stop_str_in_output"},
    FieldName{"temperature", "temperature"},
    FieldName{"top_p", "top_p"},
    FieldName{"top_k", "top_k"},
    FieldName{"min_p", "min_p"},
    FieldName{"frequency_penalty", "frequency_penalty"},
    FieldName{"presence_penalty", "presence_penalty"},
    FieldName{"repetition_penalty", "repetition_penalty"},
    FieldName{"stop", "stop"},
    FieldName{"stop_token_ids", "stop_token_ids"},
    FieldName{"ignore_eos", "ignore_eos"},
    FieldName{"skip_special_tokens", "skip_special_tokens"},
    FieldName{"spaces_between_special_tokens", "spaces_between_special_tokens"},
    FieldName{"n", "n"},
    FieldName{"logit_bias", "logit_bias"},
    FieldName{"json_schema", "json_schema"},
    FieldName{"regex", "regex"},
    FieldName{"ebnf", "ebnf"},
};
constexpr std::array<std::string_view, 4> kRefusedSampling = {"stop_regex", "structural_tag",
                                                              "custom_params", "thinking_budget"};
constexpr std::array<std::string_view, 10> kFields = {"text",
                                                      "input_ids",
                                                      "sampling_params",
                                                      "stream",
                                                      "return_logprob",
                                                      "logprob_start_len",
                                                      "top_logprobs_num",
                                                      "rid",
                                                      "priority",
                                                      "timeout"};
constexpr std::array kIgnored = {
    IgnoredRow{"return_text_in_logprobs", {"false"}},
    IgnoredRow{"log_metrics"},
    IgnoredRow{"conversation_id"},
    IgnoredRow{"model"},
};
constexpr std::array<std::string_view, 11> kRefused = {"input_embeds",
                                                       "image_data",
                                                       "video_data",
                                                       "audio_data",
                                                       "lora_path",
                                                       "token_ids_logprob",
                                                       "session_params",
                                                       "return_hidden_states",
                                                       "custom_logit_processor",
                                                       "return_routed_experts",
                                                       "modalities"};

/// Refuses what is set: to something else than nothing, false or an empty text.
void refuse_set(FieldReader& fields, std::string_view key, const std::string& where) {
  const Json* value = fields.find(key);
  if (value != nullptr && !(value->is_string() && value->as_string().empty())) {
    fields.refuse(key, fmt::format("/generate here has no {}{}", where, key));
  }
}

void read_prompt(FieldReader& fields, Json& completion) {
  const Json* text = fields.find("text");
  const Json* ids = fields.find("input_ids");
  if ((text == nullptr) == (ids == nullptr)) {
    fields.fail(text == nullptr ? "text" : "input_ids", "expected either text or input_ids");
    return;
  }
  const auto is_text = [](const Json& value) { return value.is_string(); };
  if (text != nullptr && !text->is_string() &&
      !(text->is_array() && std::ranges::all_of(text->as_array(), is_text))) {
    fields.fail("text", "text: expected a string or an array of strings");
  } else if (ids != nullptr && !ids->is_array()) {
    fields.fail("input_ids", "input_ids: expected an array of token ids, or of such arrays");
  } else {
    completion.set("prompt", text != nullptr ? *text : *ids);
  }
}

void read_sampling(FieldReader& fields, Strictness strictness, TranslatedBody& out) {
  Json& completion = out.body;
  completion.set("max_tokens", kDefaultMaxTokens);
  const Json* sampling = fields.find("sampling_params");
  if (sampling == nullptr) {
    return;
  }
  if (!sampling->is_object()) {
    fields.fail("sampling_params", "sampling_params: expected an object, for all prompts");
    return;
  }
  FieldReader inner(*sampling);
  const auto known = [](std::string_view key) {
    return std::ranges::any_of(kSampling, [&](const FieldName& n) { return n.theirs == key; }) ||
           std::ranges::find(kRefusedSampling, key) != kRefusedSampling.end();
  };
  out.ignored.unknown += check_unknown_fields(inner, *sampling, known, strictness);
  for (const std::string_view key : kRefusedSampling) {
    refuse_set(inner, key, "sampling_params.");
  }
  for (const FieldName& name : kSampling) {
    if (const Json* value = inner.find(name.theirs)) {
      completion.set(std::string(name.ours), *value);
    }
  }
  if (inner.error()) {
    fields.fail("sampling_params." + inner.error()->param, inner.error()->message);
  }
}

void read_logprobs(FieldReader& fields, Json& completion) {
  bool wanted = false;
  int64_t top = 0;
  int64_t start = -1;
  fields.boolean("return_logprob", wanted);
  fields.integer("top_logprobs_num", 0, kMaxLogprobs, top);
  fields.integer("logprob_start_len", -1, std::numeric_limits<int32_t>::max(), start);
  if (!wanted) {
    return;
  }
  if (start >= 0) {
    completion.set("prompt_logprobs", top);
  }
  completion.set("logprobs", top);
}

}  // namespace

ChatBody completion_of_generate(const Json& body, Strictness strictness) {
  FieldReader fields(body);
  TranslatedBody out{.body = JsonObject()};
  const auto known = [](std::string_view key) {
    return std::ranges::find(kFields, key) != kFields.end() ||
           std::ranges::find(kRefused, key) != kRefused.end() ||
           std::ranges::find(kIgnored, key, &IgnoredRow::name) != kIgnored.end();
  };
  out.ignored.unknown = check_unknown_fields(fields, body, known, strictness);
  read_ignored(fields, kIgnored, strictness, out.ignored);
  for (const std::string_view key : kRefused) {
    refuse_set(fields, key, "");
  }
  read_prompt(fields, out.body);
  read_sampling(fields, strictness, out);
  read_logprobs(fields, out.body);
  for (const char* key : {"stream", "priority", "timeout"}) {
    if (const Json* value = fields.find(key)) {
      out.body.set(key, *value);
    }
  }
  if (fields.error()) {
    return *fields.error();
  }
  return out;
}

}  // namespace nibble
