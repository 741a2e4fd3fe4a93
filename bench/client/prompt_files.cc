#include <algorithm>
#include <optional>
#include <random>

#include "base/file.h"
#include "base/json_lines.h"
#include "base/log.h"
#include "bench/client/prompts.h"

namespace nibble {
namespace {

// What both other clients leave out of ShareGPT.
constexpr int64_t kLeastTokens = 4;
constexpr int64_t kMostPrompt = 1024;
constexpr int64_t kMostTogether = 2048;
constexpr int64_t kUsualOutput = 256;

Result<std::string> read_data(const PromptOptions& options) {
  if (options.path.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "this --dataset-name needs its file: --dataset-path FILE");
  }
  return read_file(options.path);
}

/// The objects of a JSON array, or of JSON lines.
Result<std::vector<Json>> read_objects(const PromptOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_data(options));
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '[') {
    auto json = Json::parse(text);
    if (!json.ok()) {
      return json.status().with_context(options.path);
    }
    return std::move(json->as_array());
  }
  std::vector<Json> out;
  NIBBLE_RETURN_IF_ERROR(
      for_each_json_line({.text = text, .where = options.path, .limit = 0}, [&](const Json& json) {
        out.push_back(json);
        return Status();
      }));
  return out;
}

Result<int64_t> count_tokens(const std::string& text, const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) {
    return int64_t{-1};
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto ids, tokenizer->encode_prompt(text));
  return std::ssize(ids);
}

std::optional<std::string> turn(const Json& conversation, size_t which) {
  const Json* turns = conversation.find("conversations");
  turns = turns != nullptr ? turns : conversation.find("conversation");
  if (turns == nullptr || !turns->is_array() || turns->as_array().size() < 2) {
    return std::nullopt;
  }
  const Json& found = turns->as_array()[which];
  for (const char* key : {"value", "content"}) {
    if (const Json* text = found.find(key); text != nullptr && text->is_string()) {
      return text->as_string();
    }
  }
  return std::nullopt;
}

bool is_usable(const Prompt& prompt, bool fixed_output) {
  if (prompt.input_len < 0) {
    return !prompt.text.empty();
  }
  return prompt.input_len >= kLeastTokens && prompt.input_len <= kMostPrompt &&
         (fixed_output || prompt.output_len >= kLeastTokens) &&
         (fixed_output || prompt.input_len + prompt.output_len <= kMostTogether);
}

Status none_in(const std::string& path, std::string_view what) {
  return make_error(StatusCode::kCorrupt, "{}: has no {}", path, what);
}

void warn_of_few(const std::vector<Prompt>& prompts, int64_t wanted, const std::string& path) {
  if (std::ssize(prompts) < wanted) {
    NIBBLE_LOG(kWarning, "{} has {} prompts; none is asked twice, so there are fewer than {}", path,
               prompts.size(), wanted);
  }
}

Result<Prompt> custom_prompt(const Json& json, const PromptOptions& options) {
  Prompt out;
  const Json* text = json.find("prompt");
  const Json* messages = json.find("messages");
  if (text != nullptr && text->is_string()) {
    out.text = text->as_string();
    NIBBLE_ASSIGN_OR_RETURN(out.input_len, count_tokens(out.text, options.tokenizer));
  } else if (messages != nullptr && messages->is_array()) {
    out.messages = *messages;
  } else {
    return make_error(StatusCode::kCorrupt, "has neither prompt, a string, nor messages, a list");
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t output,
                          JsonReader(json, "").optional_int("output_tokens", kUsualOutput));
  out.output_len = options.fixed_output > 0 ? options.fixed_output : output;
  if (out.output_len < 1) {
    return make_error(StatusCode::kCorrupt, "output_tokens: {} is not above 0", out.output_len);
  }
  return out;
}

}  // namespace

Result<std::vector<Prompt>> sharegpt_prompts(const PromptOptions& options) {
  const bool fixed = options.fixed_output > 0;
  if (!fixed && options.tokenizer == nullptr) {
    return make_error(StatusCode::kInvalidArgument,
                      "--dataset-name sharegpt counts the tokens of its answers: give --tokenizer "
                      "DIR, or --output-len");
  }
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Json> objects, read_objects(options));
  std::shuffle(objects.begin(), objects.end(), std::mt19937_64(options.seed));
  std::vector<Prompt> out;
  for (const Json& object : objects) {
    if (std::ssize(out) == options.count) {
      break;
    }
    auto question = turn(object, 0);
    const auto answer = turn(object, 1);
    if (!question || !answer) {
      continue;
    }
    Prompt prompt;
    prompt.text = std::move(*question);
    NIBBLE_ASSIGN_OR_RETURN(prompt.input_len, count_tokens(prompt.text, options.tokenizer));
    prompt.output_len = options.fixed_output;
    if (!fixed) {
      NIBBLE_ASSIGN_OR_RETURN(prompt.output_len, count_tokens(*answer, options.tokenizer));
    }
    if (is_usable(prompt, fixed)) {
      out.push_back(std::move(prompt));
    }
  }
  if (out.empty()) {
    return none_in(options.path, "conversations of two turns within the limits of ShareGPT runs");
  }
  warn_of_few(out, options.count, options.path);
  return out;
}

Result<std::vector<Prompt>> custom_prompts(const PromptOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_data(options));
  std::vector<Prompt> out;
  NIBBLE_RETURN_IF_ERROR(for_each_json_line(
      {.text = text, .where = options.path, .limit = options.count}, [&](const Json& json) {
        NIBBLE_ASSIGN_OR_RETURN(Prompt prompt, custom_prompt(json, options));
        out.push_back(std::move(prompt));
        return Status();
      }));
  if (out.empty()) {
    return none_in(options.path, "prompts");
  }
  warn_of_few(out, options.count, options.path);
  return out;
}

}  // namespace nibble
