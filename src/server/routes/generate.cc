#include <chrono>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "server/chat_body.h"
#include "server/error.h"
#include "server/field_reader.h"
#include "server/generation.h"
#include "server/prompt.h"
#include "server/routes.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;

enum class Shape { kObject, kArray };  // of an answer: an array for arrays of prompts

struct GenerateOptions {
  std::string id;
  Shape shape = Shape::kObject;
  bool logprobs = false;
  std::optional<size_t> logprob_start;  // where log probabilities of prompts begin, if asked for
};

/// SGLang's answers. What a stream has sent of a choice comes again with every event.
class GenerateFormat final : public AnswerFormat {
 public:
  explicit GenerateFormat(GenerateOptions options) : options_(std::move(options)) {}

  std::string whole_body(const std::vector<Choice>& choices, const Usage& /*total*/) override {
    if (options_.shape == Shape::kObject) {
      return answer(choices.front()).dump();
    }
    JsonArray list;
    for (const Choice& choice : choices) {
      list.push_back(answer(choice));
    }
    return Json(std::move(list)).dump();
  }

  std::string stream_begin(const Choice& /*choice*/) override { return {}; }

  std::string stream_piece(const Choice& choice,
                           const AnswerPiece& /*piece*/,
                           int64_t /*call*/) override {
    return event(choice);
  }

  std::string stream_choice_end(const Choice& choice) override { return event(choice); }

  std::string stream_end(const Usage& /*total*/) override { return data_event("[DONE]"); }

  std::string stream_failure(const ApiError& error) override {
    return data_event(error_json(error)) + data_event("[DONE]");
  }

 private:
  /// Log probabilities of a choice so far: [value, token id, null] each.
  struct Logprobs {
    JsonArray tokens, tops;
  };

  static Json entry(int32_t token, float logprob) {
    return JsonArray{static_cast<double>(logprob), token, Json()};
  }

  const Logprobs& logprobs(const Choice& choice) {
    const auto index = static_cast<size_t>(choice.index);
    if (index >= logprobs_.size()) {
      logprobs_.resize(index + 1);
    }
    Logprobs& all = logprobs_[index];
    for (const TokenEntry& one : choice.entries) {  // those that no event had
      JsonArray top;
      for (const TokenLogprob& other : one.event.top_logprobs) {
        top.push_back(entry(other.token, other.logprob));
      }
      all.tokens.push_back(entry(one.event.token, one.event.logprob));
      all.tops.emplace_back(std::move(top));
    }
    return all;
  }

  /// Of the prompt: of its first token that is asked for, as of the first of all, only the id.
  void add_input(const Choice& choice, Json& meta) const {
    JsonArray tokens, tops;
    for (size_t i = options_.logprob_start.value_or(choice.prompt.size()); i < choice.prompt.size();
         ++i) {
      if (tokens.empty() || i == 0) {
        tokens.emplace_back(JsonArray{Json(), choice.prompt[i], Json()});
        tops.emplace_back();
        continue;
      }
      if (i > choice.prompt_logprobs.size()) {  // it was aborted in front of them
        break;
      }
      const ScoredToken& scored = choice.prompt_logprobs[i - 1];
      JsonArray top;
      for (const TokenLogprob& other : scored.top_logprobs) {
        top.push_back(entry(other.token, other.logprob));
      }
      tokens.push_back(entry(scored.token, scored.logprob));
      tops.emplace_back(std::move(top));
    }
    meta.set("input_token_logprobs", std::move(tokens));
    meta.set("input_top_logprobs", std::move(tops));
  }

  static Json finish_reason(const Choice& choice) {
    if (choice.finish_reason.empty()) {
      return {};
    }
    if (choice.timed_out) {
      return Json::object(
          {{"type", "abort"}, {"message", "the time limit of the request is over"}});
    }
    if (choice.finish_reason == "length") {
      return Json::object({{"type", "length"}, {"length", choice.usage.completion_tokens}});
    }
    if (choice.finish_reason == "abort") {
      return Json::object({{"type", "abort"}, {"message", "aborted by /abort_request"}});
    }
    const bool text = choice.text.stopped() || choice.tokens.empty();
    return Json::object(
        {{"type", "stop"},
         {"matched", text ? Json(choice.text.stop_string()) : Json(choice.tokens.back())}});
  }

  Json answer(const Choice& choice) {
    const bool one = options_.shape == Shape::kObject;
    Json meta = Json::object(
        {{"id", one ? options_.id : fmt::format("{}_{}", options_.id, choice.index)},
         {"finish_reason", finish_reason(choice)},
         {"prompt_tokens", choice.usage.prompt_tokens},
         {"completion_tokens", choice.usage.completion_tokens},
         {"cached_tokens", choice.usage.cached_tokens},
         {"weight_version", "default"},
         {"e2e_latency", std::chrono::duration<double>(Clock::now() - begun_).count()}});
    if (options_.logprobs) {
      const Logprobs& all = logprobs(choice);
      add_input(choice, meta);
      meta.set("output_token_logprobs", all.tokens);
      meta.set("output_top_logprobs", all.tops);
    }
    return Json::object({{"text", choice.answer},
                         {"output_ids", JsonArray(choice.tokens.begin(), choice.tokens.end())},
                         {"meta_info", std::move(meta)}});
  }

  std::string event(const Choice& choice) {
    Json out = answer(choice);
    if (options_.shape == Shape::kArray) {
      out.set("index", choice.index);
    }
    return data_event(out.dump());
  }

  GenerateOptions options_;
  std::vector<Logprobs> logprobs_;  // by choice
  Clock::time_point begun_ = Clock::now();
};

/// Errors name the fields of the route.
ApiError of_generate(const Json& body, const ApiError& error) {
  return renamed(error, {{"prompt", body.find("input_ids") != nullptr ? "input_ids" : "text"},
                         {"prompt_logprobs", "logprob_start_len"},
                         {"max_tokens", "sampling_params.max_new_tokens"},
                         {"min_tokens", "sampling_params.min_new_tokens"},
                         {"seed", "sampling_params.sampling_seed"},
                         {"temperature", "sampling_params.temperature"},
                         {"top_p", "sampling_params.top_p"},
                         {"top_k", "sampling_params.top_k"},
                         {"stop", "sampling_params.stop"},
                         {"n", "sampling_params.n"}});
}

/// Token ids of all prompts.
std::optional<ApiError> read_prompts(const AppContext& context, GenerationJob& job) {
  if (auto error = check_request(context, job.request, job.request.prompts.size())) {
    return error;
  }
  auto prompts = prompt_tokens(context, job.request.prompts, {});
  if (const auto* error = std::get_if<ApiError>(&prompts)) {
    return *error;
  }
  job.prompts = std::get<0>(std::move(prompts));
  return std::nullopt;
}

bool is_list(const Json& body) {
  const Json* text = body.find("text");
  const Json* ids = body.find("input_ids");
  return (text != nullptr && text->is_array()) ||
         (ids != nullptr && ids->is_array() && !ids->as_array().empty() &&
          ids->as_array().front().is_array());
}

}  // namespace

void route_generate(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const auto object = parse_object(exchange->request().body);
  if (const auto* error = std::get_if<ApiError>(&object)) {
    refuse(*exchange, *error);
    return;
  }
  const Json& body = std::get<Json>(object);
  const SchemaOptions& schema = context.options.schema;
  const ChatBody completion = completion_of_generate(body, schema.strictness);
  if (const auto* error = std::get_if<ApiError>(&completion)) {
    refuse(*exchange, *error);
    return;
  }
  const auto& [body_of_completion, ignored] = std::get<TranslatedBody>(completion);
  ParsedRequest parsed = read_completion_request(body_of_completion, schema);
  FieldReader fields(body);
  GenerateOptions options{.id = exchange->request().id};
  fields.text("rid", options.id);
  if (const auto* error = std::get_if<ApiError>(&parsed); error != nullptr || fields.error()) {
    refuse(*exchange, error != nullptr ? of_generate(body, *error) : *fields.error());
    return;
  }
  GenerationJob job{.request = std::move(std::get<GenerationRequest>(parsed)), .id = options.id};
  for (const std::string_view name : ignored.known) {
    job.request.ignored.add(name);
  }
  job.request.ignored.unknown += ignored.unknown;
  if (const auto error = read_prompts(context, job)) {
    refuse(*exchange, of_generate(body, *error));
    return;
  }
  options.shape = is_list(body) || job.request.n > 1 ? Shape::kArray : Shape::kObject;
  options.logprobs = job.request.logprobs >= 0;
  if (job.request.prompt_logprobs >= 0) {
    options.logprob_start = static_cast<size_t>(body.find("logprob_start_len")->as_int());
  }
  job.format = std::make_unique<GenerateFormat>(std::move(options));
  run_generation(context, exchange, std::move(job));
}

}  // namespace nibble
